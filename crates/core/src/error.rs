//! One error for the whole data path: a stable kind and a code for programs, a context for people, the source below it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::Code;

/// The result of anything in the data path.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in terms a front can turn into its wire's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request makes no sense: EINVAL.
    InvalidInput,
    /// Past the end of the disk: EINVAL on reads, ENOSPC on writes in NBD.
    OutOfRange,
    /// A write to something read-only: EPERM / EROFS.
    ReadOnly,
    /// The store has no room: ENOSPC.
    NoSpace,
    /// The store failed: EIO.
    Io,
    /// The image's metadata contradicts itself or its format: EIO to a guest.
    Corrupt,
    /// Valid, but not something this build, kernel or store can do: ENOTSUP.
    Unsupported,
    /// No such file, parent or export: ENOENT.
    NotFound,
    /// Not allowed by permissions or policy: EACCES.
    Denied,
    /// It exists already: EEXIST.
    Exists,
    /// In use by another process: EBUSY.
    Busy,
    /// A peer broke its protocol.
    Protocol,
    /// A peer or a device took too long.
    TimedOut,
    /// Out of memory, descriptors or slots.
    Exhausted,
    /// The server or the disk ends. A front does not answer a request that its disk ends in this way: it was left undone, and the
    /// next server does it.
    Shutdown,
}

/// An error with its context. Small to move (one pointer).
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    code: Option<Code>,
    message: String,
    path: Option<PathBuf>,
    offset_bytes: Option<u64>,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    errno: Option<i32>,
    is_permanent: bool,
}

impl Error {
    /// An error of `kind`; `message` says which operation failed and why.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self(Box::new(Inner {
            kind,
            code: None,
            message,
            path: None,
            offset_bytes: None,
            hint: None,
            source: None,
            errno: None,
            is_permanent: false,
        }))
    }

    /// An error made from a system call's; `operation` is what was tried, such as "read" or "open".
    pub fn io(operation: impl Into<String>, source: io::Error) -> Self {
        let mut error = Self::new(kind_of(&source), operation);
        error.0.errno = source.raw_os_error();
        error.0.source = Some(Box::new(source));
        error
    }

    /// [`Error::io`] of a bare errno.
    pub fn errno(operation: impl Into<String>, errno: i32) -> Self {
        Self::io(operation, io::Error::from_raw_os_error(errno))
    }

    /// Adds the code of its cause.
    pub fn coded(mut self, code: Code) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Adds the path, unless one nearer the cause is set already.
    pub fn at_path(mut self, path: &Path) -> Self {
        self.0.path.get_or_insert_with(|| path.to_owned());
        self
    }

    /// Adds the byte offset in that path, unless one nearer the cause is set already.
    pub fn at_offset(mut self, offset_bytes: u64) -> Self {
        self.0.offset_bytes.get_or_insert(offset_bytes);
        self
    }

    /// Adds what the reader may do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds a source.
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Says that the same request fails again, or must not be tried again, whatever happens below: a sync has failed and
    /// nobody knows what was lost, or an image takes no more writes until it is opened again.
    pub fn permanent(mut self) -> Self {
        self.0.is_permanent = true;
        self
    }

    /// True for a failure that [`Error::permanent`] marks.
    pub fn is_permanent(&self) -> bool {
        self.0.is_permanent
    }

    /// True when the same request may succeed later although nobody changes it: there is no space (or a file may not be longer now), memory or
    /// descriptor, the device or the server fails, or it takes too long. The other kinds say that something is wrong with the request, with
    /// the image, or with a permission.
    pub fn may_pass(&self) -> bool {
        let is_passing = match self.kind() {
            ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::TimedOut | ErrorKind::Exhausted => true,
            ErrorKind::InvalidInput
            | ErrorKind::OutOfRange
            | ErrorKind::ReadOnly
            | ErrorKind::Corrupt
            | ErrorKind::Unsupported
            | ErrorKind::NotFound
            | ErrorKind::Denied
            | ErrorKind::Exists
            | ErrorKind::Busy
            | ErrorKind::Protocol
            | ErrorKind::Shutdown => false,
        };
        is_passing && !self.is_permanent()
    }

    /// The stable kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The code of its cause, if programs act on that: its own one, or that of the error below it.
    pub fn code(&self) -> Option<Code> {
        let below = || self.0.source.as_ref()?.downcast_ref::<Self>()?.code();
        self.0.code.or_else(below)
    }

    /// True when the error has this code.
    pub fn is(&self, code: Code) -> bool {
        self.code() == Some(code)
    }

    /// The message without path, offset and hint.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The path it happened on, if known.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The byte offset it happened at, if known.
    pub fn offset_bytes(&self) -> Option<u64> {
        self.0.offset_bytes
    }

    /// What to do about it, if known.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The kernel's errno below it, if there was one.
    pub fn os_errno(&self) -> Option<i32> {
        self.0.errno
    }

    /// The same error in other words: `say` turns each of its texts, and its path, into what it says. Its kind and its errno stay.
    pub fn reworded(&self, say: impl Fn(&str) -> String) -> Self {
        let mut error = self.duplicate();
        let inner = &mut *error.0;
        inner.message = say(&inner.message);
        inner.path = inner.path.take().map(|path| say(&path.to_string_lossy()).into());
        inner.hint = inner.hint.take().map(|hint| say(&hint));
        inner.source = inner.source.take().map(|source| say(&source.to_string()).into());
        error
    }

    /// The same error again, for a second waiter on one failed operation: everything but the source's type.
    pub fn duplicate(&self) -> Self {
        let i = &self.0;
        let source = i.source.as_ref().map(|s| s.to_string().into());
        Self(Box::new(Inner {
            kind: i.kind,
            code: self.code(),
            message: i.message.clone(),
            path: i.path.clone(),
            offset_bytes: i.offset_bytes,
            hint: i.hint.clone(),
            source,
            errno: i.errno,
            is_permanent: i.is_permanent,
        }))
    }
}

/// ENFILE and EMFILE: the system, or this process, has no descriptor left.
const NO_DESCRIPTOR: [i32; 2] = [23, 24];

fn kind_of(error: &io::Error) -> ErrorKind {
    use io::ErrorKind as K;
    match error.kind() {
        _ if error.raw_os_error().is_some_and(|errno| NO_DESCRIPTOR.contains(&errno)) => ErrorKind::Exhausted,
        K::NotFound => ErrorKind::NotFound,
        K::PermissionDenied => ErrorKind::Denied,
        K::AlreadyExists => ErrorKind::Exists,
        K::InvalidInput => ErrorKind::InvalidInput,
        K::StorageFull | K::QuotaExceeded | K::FileTooLarge => ErrorKind::NoSpace,
        K::ReadOnlyFilesystem => ErrorKind::ReadOnly,
        K::Unsupported => ErrorKind::Unsupported,
        K::TimedOut => ErrorKind::TimedOut,
        K::OutOfMemory => ErrorKind::Exhausted,
        K::ResourceBusy | K::ExecutableFileBusy | K::AddrInUse => ErrorKind::Busy,
        _ => ErrorKind::Io,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let i = &self.0;
        if let Some(path) = &i.path {
            write!(f, "{}: ", path.display())?;
        }
        write!(f, "{}", i.message)?;
        if let Some(offset) = i.offset_bytes {
            write!(f, " at offset {offset:#x}")?;
        }
        if let Some(source) = &i.source {
            write!(f, ": {source}")?;
        }
        if let Some(hint) = &i.hint {
            write!(f, " ({hint})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

/// Adds context to the error of a result.
pub trait ResultExt<T> {
    /// [`Error::at_path`] on the error.
    fn at_path(self, path: &Path) -> Result<T>;
    /// [`Error::at_offset`] on the error.
    fn at_offset(self, offset_bytes: u64) -> Result<T>;
}

impl<T> ResultExt<T> for Result<T> {
    fn at_path(self, path: &Path) -> Result<T> {
        self.map_err(|e| e.at_path(path))
    }

    fn at_offset(self, offset_bytes: u64) -> Result<T> {
        self.map_err(|e| e.at_offset(offset_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_says_where_what_and_what_to_do() {
        let error =
            Error::errno("write failed", 28).at_offset(0x1000).at_path(Path::new("/d/a.vhd")).hint("free some space");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.os_errno(), Some(28));
        assert_eq!(
            error.to_string(),
            "/d/a.vhd: write failed at offset 0x1000: No space left on device (os error 28) (free some space)"
        );
    }

    #[test]
    fn an_error_in_other_words_keeps_its_kind_and_its_errno() {
        let error = Error::errno("cannot connect to a", 2).at_path(Path::new("/a")).hint("start a").permanent();
        let error = error.coded(Code::InUse);
        let other = error.reworded(|text| text.replace('a', "b"));
        assert_eq!((other.kind(), other.os_errno()), (ErrorKind::NotFound, Some(2)));
        assert!(other.is(Code::InUse) && other.is_permanent() && other.path() == Some(Path::new("/b")));
        assert_eq!(other.to_string(), "/b: cbnnot connect to b: No such file or directory (os error 2) (stbrt b)");
    }

    #[test]
    fn the_code_of_the_error_below_is_kept() {
        let below = Error::new(ErrorKind::Denied, "the server refuses").coded(Code::NameFree);
        let error = Error::new(ErrorKind::Unsupported, "the chain cannot be kept").caused_by(below);
        assert!(error.is(Code::NameFree) && error.duplicate().is(Code::NameFree));
        assert!(error.coded(Code::Retry).is(Code::Retry));
    }

    #[test]
    fn only_trouble_below_may_pass() {
        for errno in [5, 12, 19, 27, 28, 110, 121, 122] {
            assert!(Error::errno("write", errno).may_pass(), "{errno}");
        }
        for errno in [1, 13, 22, 30, 95] {
            assert!(!Error::errno("write", errno).may_pass(), "{errno}");
        }
        assert!(!Error::new(ErrorKind::Corrupt, "bad").may_pass());
        let lost = Error::errno("sync", 5).permanent();
        assert!(!lost.may_pass() && !lost.duplicate().may_pass());
    }

    #[test]
    fn the_innermost_context_wins() {
        let error = Error::new(ErrorKind::Corrupt, "bad").at_path(Path::new("inner")).at_path(Path::new("outer"));
        assert_eq!(error.path(), Some(Path::new("inner")));
    }
}
