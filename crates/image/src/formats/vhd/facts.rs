//! Facts about a VHD, for `spile info`.

use spile_core::{Store, format_size};

use super::codec::footer::{DiskType, Footer};
use super::codec::header::Header;
use super::codec::time;
use super::parent::parent_format;
use super::{Head, Sparse};
use crate::facts::{Facts, Record, Value};

/// What only a dynamic or differencing image has.
pub(super) struct SparseFacts<'a> {
    header: &'a Header,
    /// `None` where not all of the table has been read.
    allocated_blocks: Option<u64>,
    total_blocks: u64,
    has_journal: bool,
    is_unflushed: bool,
    footer_problem: Option<&'a str>,
}

impl<S: Store> Sparse<S> {
    pub(super) fn sparse_facts<'a>(&'a self, head: &'a Head) -> SparseFacts<'a> {
        SparseFacts {
            header: &head.header,
            allocated_blocks: (!self.bat.is_lazy()).then(|| self.bat.allocated().count() as u64),
            total_blocks: u64::from(self.bat.entries()),
            has_journal: self.layout.journal.is_some(),
            is_unflushed: self.journal.has_pending(),
            footer_problem: self.footer_problem.as_deref(),
        }
    }
}

/// All facts of an image with this footer.
pub(super) fn of(footer: &Footer, sparse: Option<SparseFacts<'_>>) -> Facts {
    let is_child = footer.disk_type == DiskType::Differencing;
    let parent = sparse.as_ref().filter(|_| is_child).map(|sparse| sparse.header);
    let subformat = match footer.disk_type {
        DiskType::Fixed => "fixed",
        DiskType::Dynamic => "dynamic",
        DiskType::Differencing => "differencing",
    };
    let changed_unix_s = time::to_unix_s(footer.timestamp);
    let other_size_bytes = footer.other_size_bytes();
    let footer_problem = sparse.as_ref().and_then(|sparse| sparse.footer_problem);
    let geometry = &footer.geometry;
    let geometry = format!("{}/{}/{}", geometry.cylinders, geometry.heads, geometry.sectors);
    let values: Record = vec![
        ("uuid", format_uuid(&footer.uuid).into()),
        ("creator", format_creator(footer.creator).into()),
        ("creator_version", format_version(footer.creator_version).into()),
        ("created_unix_s", changed_unix_s.into()),
        ("geometry", geometry.clone().into()),
        ("geometry_size_bytes", other_size_bytes.into()),
        ("footer_problem", footer_problem.into()),
        ("block_bytes", sparse.as_ref().map(|s| s.header.block_size_bytes).into()),
        ("allocated_blocks", sparse.as_ref().and_then(|s| s.allocated_blocks).into()),
        ("total_blocks", sparse.as_ref().map(|s| s.total_blocks).into()),
        ("parent_name", parent.map(|header| header.parent_name.clone()).into()),
        ("parent_format", parent.map(|header| parent_format(&header.parent_uuid).to_string()).into()),
        ("parent_uuid", parent.map(|header| format_uuid(&header.parent_uuid)).into()),
        ("journal", Value::Bool(sparse.as_ref().is_some_and(|s| s.has_journal))),
        ("unflushed", Value::Bool(sparse.as_ref().is_some_and(|s| s.is_unflushed))),
    ];
    let mut lines = Vec::new();
    lines.extend(sparse.as_ref().and_then(|s| Some(("blocks", s.blocks_line()?))));
    let creator = format_creator(footer.creator);
    lines.push(("creator", format!("{creator} {}", format_version(footer.creator_version))));
    lines.push(("uuid", format_uuid(&footer.uuid)));
    let other_size = other_size_bytes.map_or(String::new(), |size| format!(", {size} bytes; the size counts"));
    lines.push(("geometry", format!("{geometry} (C/H/S){other_size}")));
    lines.extend(footer_problem.map(|problem| ("footers", problem.to_owned())));
    lines.extend(parent.map(|header| ("child of", parent_line(header))));
    lines.extend(sparse.as_ref().and_then(SparseFacts::journal_line).map(|line| ("journal", line)));
    let parent_changed_unix_s =
        parent.map(|header| header.parent_timestamp).filter(|&stamp| stamp > 0).map(time::to_unix_s);
    Facts {
        subformat: Some(subformat),
        changed_unix_s: Some(changed_unix_s),
        parent_changed_unix_s,
        // No other program's images have one.
        is_ours: sparse.as_ref().is_some_and(|s| s.has_journal),
        values,
        lines,
    }
}

impl SparseFacts<'_> {
    fn blocks_line(&self) -> Option<String> {
        let size = format_size(u64::from(self.header.block_size_bytes));
        Some(format!("{} of {} allocated, {size} each", self.allocated_blocks?, self.total_blocks))
    }

    fn journal_line(&self) -> Option<String> {
        let line = match self.is_unflushed {
            false => "clean",
            true => "has records that the next flush or open for writing takes in",
        };
        self.has_journal.then(|| line.to_owned())
    }
}

fn parent_line(header: &Header) -> String {
    let uuid = &header.parent_uuid;
    format!("{} ({}, {})", header.parent_name, parent_format(uuid), format_uuid(uuid))
}

fn format_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Four characters from a file: only those that are safe to print.
fn format_creator(creator: [u8; 4]) -> String {
    let shown = creator.iter().filter(|byte| byte.is_ascii_graphic());
    shown.map(|byte| char::from(*byte)).collect()
}

fn format_version(version: u32) -> String {
    format!("{}.{}", version >> 16, version & 0xffff)
}
