//! [`Code`]: the cause of an error, where a program acts on it.

/// The cause of an error that a program acts on. An [`Error`](crate::Error) has one beside its kind
/// where the kind alone does not say what to do.
///
/// Codes go over every wire: the control API (`code`), a takeover, and the orders between hosts.
/// Their names never change. docs/control.md lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Another process has the file open, in a way that excludes this use.
    InUse,
    /// The operation would exceed a limit of the image's format.
    FormatLimit,
    /// The image's last writer was killed, so its reference counts may be wrong (qcow2's dirty
    /// bit), and the caller asked to keep them.
    ImageDirty,
    /// The server does not know this request: it is of another version.
    RequestUnknown,
    /// The other host cannot tell yet whether it obeys an order. The same order may be given again.
    Retry,
    /// The other host does not know this order: its `spile receive` is of another version.
    OrderUnknown,
    /// The other host refuses the name of a disk or of a parent.
    BadName,
    /// Nothing has this name on the other host.
    NameFree,
    /// The copy on the other host is complete and has its name. The job that made it no longer
    /// writes to it.
    CopyComplete,
    /// The other host has no image of this move.
    NoSuchMove,
    /// Nobody knows which attempt of the move made the image on the other host.
    CopyUnknown,
}

/// Each code with its name on every wire.
const NAMES: [(Code, &str); 11] = [
    (Code::InUse, "in_use"),
    (Code::FormatLimit, "format_limit"),
    (Code::ImageDirty, "image_dirty"),
    (Code::RequestUnknown, "request_unknown"),
    (Code::Retry, "retry"),
    (Code::OrderUnknown, "order_unknown"),
    (Code::BadName, "bad_name"),
    (Code::NameFree, "name_free"),
    (Code::CopyComplete, "copy_complete"),
    (Code::NoSuchMove, "no_such_move"),
    (Code::CopyUnknown, "copy_unknown"),
];

impl Code {
    /// All codes.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(code, _)| code)
    }

    /// The code's name on every wire.
    pub fn name(self) -> &'static str {
        let known = NAMES.iter().find(|(code, _)| *code == self);
        known.map_or("", |(_, name)| name)
    }

    /// The code of this name. `None` for a name that this version does not know.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, known)| *known == name).map(|(code, _)| *code)
    }
}

/// The text of an error on a wire that has a place for people's words only: `[CODE] TEXT`, or
/// `TEXT` when there is no code.
pub fn coded_text(code: Option<Code>, text: &str) -> String {
    code.map_or_else(|| text.to_owned(), |code| format!("[{}] {text}", code.name()))
}

/// The code and the words of a text that [`coded_text`] made. The words of another program may
/// begin like a code: then the whole text is words.
pub fn split_code(text: &str) -> (Option<Code>, &str) {
    let coded = text.strip_prefix('[').and_then(|text| text.split_once("] "));
    let known = coded.and_then(|(name, words)| Some((Code::from_name(name)?, words)));
    known.map_or((None, text), |(code, words)| (Some(code), words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_back_from_a_text() {
        for (code, text) in [(Some(Code::Retry), "not now"), (None, "not now"), (Some(Code::Retry), ""), (None, "")] {
            assert_eq!(split_code(&coded_text(code, text)), (code, text));
        }
        assert_eq!(coded_text(Some(Code::NameFree), "it is free"), "[name_free] it is free");
        for plain in ["[retry]", "[other] x", "[", "retry] x"] {
            assert_eq!(split_code(plain), (None, plain));
        }
    }

    #[test]
    fn each_code_has_a_name_of_its_own() {
        for code in Code::all() {
            // A code without a name would have the empty one.
            assert!(!code.name().is_empty() && Code::from_name(code.name()) == Some(code), "{code:?}");
        }
        assert_eq!(Code::from_name("other"), None);
    }
}
