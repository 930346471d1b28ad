//! The device files of a real Xen.
