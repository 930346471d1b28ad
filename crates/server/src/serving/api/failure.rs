//! Why a call failed, as JSON: the kind and the code of an error for programs, its words for people.

use serde::{Deserialize, Serialize};
use spile_core::{Code, Error, ErrorKind};
use utoipa::ToSchema;

/// Why a call failed.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// The reason.
    pub error: FailureDetail,
}

/// The reason of a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailureDetail {
    /// A name that stays the same from release to release, such as `not_found`.
    pub kind: String,
    /// The cause, where a program acts on it: a name that stays the same from release to release, such as `in_use`. Left out where the kind says all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// What failed, for people.
    pub message: String,
    /// The file that it is about.
    pub path: Option<String>,
    /// The offset in the file that it is about.
    pub offset_bytes: Option<u64>,
    /// What to do.
    pub hint: Option<String>,
}

/// Each kind of error with its name and its HTTP status.
const KINDS: &[(ErrorKind, &str, u16)] = &[
    (ErrorKind::InvalidInput, "invalid_input", 400),
    (ErrorKind::OutOfRange, "out_of_range", 400),
    (ErrorKind::ReadOnly, "read_only", 409),
    (ErrorKind::NoSpace, "no_space", 507),
    (ErrorKind::Io, "io", 500),
    (ErrorKind::Corrupt, "corrupt", 500),
    (ErrorKind::Unsupported, "unsupported", 422),
    (ErrorKind::NotFound, "not_found", 404),
    (ErrorKind::Denied, "denied", 403),
    (ErrorKind::Exists, "exists", 409),
    (ErrorKind::Busy, "busy", 409),
    (ErrorKind::Protocol, "protocol", 400),
    (ErrorKind::TimedOut, "timed_out", 408),
    (ErrorKind::Exhausted, "exhausted", 503),
    (ErrorKind::Shutdown, "shutdown", 503),
];

impl FailureDetail {
    /// What there is to tell of an error.
    pub fn of(error: &Error) -> Self {
        Failure::of(error).1.error
    }
}

impl Failure {
    /// The body and the HTTP status for an error.
    pub fn of(error: &Error) -> (u16, Self) {
        let known = KINDS.iter().find(|(kind, _, _)| *kind == error.kind());
        let (kind, status) = known.map_or(("io", 500), |(_, name, status)| (*name, *status));
        let mut message = error.message().to_owned();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        let detail = FailureDetail {
            kind: kind.to_owned(),
            code: error.code().map(|code| code.name().to_owned()),
            message,
            path: error.path().map(|path| path.display().to_string()),
            offset_bytes: error.offset_bytes(),
            hint: error.hint_text().map(str::to_owned),
        };
        (status, Self { error: detail })
    }

    /// The error that this body stands for, on the caller's side.
    pub fn into_error(self) -> Error {
        let FailureDetail { kind, code, message, path, offset_bytes, hint } = self.error;
        let known = KINDS.iter().find(|(_, name, _)| *name == kind);
        let mut error = Error::new(known.map_or(ErrorKind::Io, |(kind, _, _)| *kind), message);
        if let Some(code) = code.and_then(|code| Code::from_name(&code)) {
            error = error.coded(code);
        }
        if let Some(path) = path {
            error = error.at_path(path.as_ref());
        }
        if let Some(offset_bytes) = offset_bytes {
            error = error.at_offset(offset_bytes);
        }
        if let Some(hint) = hint { error.hint(hint) } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_lists_all_codes() {
        let text = include_str!("../../../../../docs/control.md");
        for code in Code::all() {
            assert!(text.contains(&format!("| `{}` |", code.name())), "{code:?}");
        }
    }

    #[test]
    fn errors_read_back() {
        for (kind, name, status) in KINDS {
            let error = Error::new(*kind, "no").at_path("/a".as_ref()).at_offset(7).hint("do");
            let (found, failure) = Failure::of(&error);
            assert_eq!((found, failure.error.kind.as_str()), (*status, *name));
            assert!(!serde_json::to_string(&failure).unwrap().contains("code"), "there is none");
            let back = failure.into_error();
            assert_eq!(back.to_string(), error.to_string());
            assert_eq!(back.kind(), *kind);
            assert!(Failure::of(&error.coded(Code::InUse)).1.into_error().is(Code::InUse));
        }
    }
}
