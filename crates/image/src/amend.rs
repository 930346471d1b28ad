//! What can be changed of an image that exists, besides its size and its parent.

/// The version of an image, and what comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revision {
    /// The version of the format.
    pub version: u32,
    /// Other programs may write refcounts late.
    pub lazy_refcounts: bool,
}

/// What is to change; `None` for what stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// The version of the format.
    pub version: Option<u32>,
    /// Whether other programs may write refcounts late.
    pub lazy_refcounts: Option<bool>,
}

/// An image that was amended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amended {
    /// What it was.
    pub before: Revision,
    /// What it is now.
    pub after: Revision,
}
