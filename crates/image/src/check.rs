//! What a check of an image reports. Each format has its own check; this is the shape of the answer.

use spile_core::{Error, ErrorKind};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth knowing; nothing is wrong for a reader that keeps to the specification.
    Note,
    /// Space that nothing refers to, or that the next writes will take without need.
    Leak,
    /// The image contradicts itself; data may be wrong or lost.
    Corruption,
}

/// One thing that was found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub message: String,
    /// Where in the file, in bytes.
    pub offset_bytes: Option<u64>,
    /// What [`Format::repair`](crate::Format::repair) does about it.
    pub mend: Mend,
}

impl Finding {
    /// True when the image contradicts itself.
    pub(crate) fn is_corruption(&self) -> bool {
        self.severity == Severity::Corruption
    }

    /// The error of work that this hinders, which `what` says.
    pub(crate) fn error(&self, what: &str) -> Error {
        let error = Error::new(ErrorKind::Corrupt, format!("{what}: {}", self.message));
        match self.offset_bytes {
            Some(offset) => error.at_offset(offset),
            None => error,
        }
    }
}

/// What [`Format::repair`](crate::Format::repair) does about a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mend {
    /// Nothing: a person has to decide.
    No,
    /// It mends the image, and no data are lost.
    Repair,
    /// It mends the image only when it is told to give up what is missing ([`Lost::Discard`]).
    DiscardLost,
}

/// What [`Format::repair`](crate::Format::repair) does with blocks whose data are not in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lost {
    /// Keeps what the map says of them and repairs nothing: when the file is complete again, so are the blocks.
    Keep,
    /// Frees blocks that lie past the end of the file, and fills those that end early with zeroes.
    Discard,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What was found, in the order of the file's parts.
    pub findings: Vec<Finding>,
    /// Units of space (blocks, clusters) that the disk has; 0 for a format without such units.
    pub total_blocks: u64,
    /// Units of space that are allocated.
    pub allocated_blocks: u64,
    /// Bytes that nothing refers to.
    pub leaked_bytes: u64,
    /// The least number of bytes that the file is too short by.
    pub missing_bytes: u64,
}

impl Report {
    /// The worst severity found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    /// The first place where the image contradicts itself.
    pub(crate) fn corruption(&self) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.is_corruption())
    }

    /// Adds a finding.
    pub fn add(
        &mut self,
        severity: Severity,
        offset_bytes: impl Into<Option<u64>>,
        mend: Mend,
        message: impl Into<String>,
    ) {
        let (message, offset_bytes) = (message.into(), offset_bytes.into());
        self.findings.push(Finding { severity, message, offset_bytes, mend });
    }
}
