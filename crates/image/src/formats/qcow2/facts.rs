//! Facts about an image, for `spile info`. Control characters in text from the image are escaped.

use super::Qcow2;
use super::check::oddities;
use super::codec::bitmap::{Bitmap, flag};
use super::codec::header::{Compression, Header, feature};
use super::codec::printable;
use super::codec::snapshot::Snapshot;
use super::data_file::is_raw;
use super::lists::{List, Lists};
use super::open::Head;
use crate::facts::{Facts, Record, Value};

/// The facts of `image`.
pub(super) fn facts<S>(image: &Qcow2<S>) -> Facts {
    let head = image.now.head();
    let mut values = header_values(&head.header);
    let text = |name: &Option<Vec<u8>>| Value::from(name.as_deref().map(printable));
    values.push(("parent_name", text(&head.backing)));
    values.push(("parent_format", text(&head.extensions.backing_format)));
    values.push(("data_file", text(&head.extensions.data_file)));
    values.extend(list_values(&image.lists));
    Facts { values, lines: lines(image, &head), ..Facts::default() }
}

fn header_values(header: &Header) -> Record {
    let compression = match header.compression() {
        Compression::Deflate => "deflate",
        Compression::Zstd => "zstd",
    };
    vec![
        ("version", header.version.into()),
        ("cluster_bytes", header.cluster_bytes().into()),
        ("refcount_bits", (1u64 << header.refcount_order).into()),
        ("extended_l2", header.has(feature::EXTENDED_L2).into()),
        ("compression", compression.into()),
        ("lazy_refcounts", (header.compatible & feature::LAZY_REFCOUNTS != 0).into()),
        ("dirty", header.has(feature::DIRTY).into()),
        ("corrupt", header.has(feature::CORRUPT).into()),
        ("data_file_is_raw", is_raw(header).into()),
    ]
}

fn list_values(lists: &Lists) -> Record {
    let snapshots = lists.snapshots.entries.iter().map(snapshot_values).collect();
    let bitmaps = lists.bitmaps.entries.iter().map(|bitmap| bitmap_values(bitmap, lists.bitmaps_are_consistent));
    vec![
        ("snapshots", Value::List(snapshots)),
        ("snapshots_fault", lists.snapshots.fault.clone().into()),
        ("bitmaps", Value::List(bitmaps.collect())),
        ("bitmaps_fault", lists.bitmaps.fault.clone().into()),
    ]
}

fn snapshot_values(snapshot: &Snapshot) -> Record {
    vec![
        ("id", printable(&snapshot.id).into()),
        ("name", printable(&snapshot.name).into()),
        ("taken_unix_s", snapshot.taken_s.into()),
        ("disk_bytes", snapshot.disk_bytes().into()),
        ("guest_state_bytes", snapshot.state_bytes().into()),
    ]
}

fn bitmap_values(bitmap: &Bitmap, consistent: bool) -> Record {
    vec![
        ("name", printable(&bitmap.name).into()),
        ("granularity_bytes", (1u64 << bitmap.granularity_bits).into()),
        ("records_writes", (bitmap.flags & flag::AUTO != 0).into()),
        ("usable", (consistent && bitmap.is_usable()).into()),
    ]
}

fn lines<S>(image: &Qcow2<S>, head: &Head) -> Vec<(&'static str, String)> {
    let header = &head.header;
    let mut lines = vec![("version", format!("{}, {}", header.version, features(header)))];
    if let Some(name) = &head.backing {
        let format = head.extensions.backing_format.as_deref().map_or("format not named".into(), printable);
        lines.push(("child of", format!("{} ({format})", printable(name))));
    }
    if let Some(name) = &head.extensions.data_file {
        lines.push(("data file", printable(name)));
    }
    let states = [(feature::DIRTY, "dirty (refcounts may lag behind)"), (feature::CORRUPT, "marked corrupt")];
    for (_, state) in states.iter().filter(|(bit, _)| header.has(*bit)) {
        lines.push(("state", (*state).to_owned()));
    }
    lines.extend(
        oddities(header).into_iter().map(|(_, what)| ("warning", format!("{what}; `spile check --repair` mends it"))),
    );
    add_list(&mut lines, "snapshots", &image.lists.snapshots, |snapshot| printable(&snapshot.name));
    let consistent = image.lists.bitmaps_are_consistent;
    add_list(&mut lines, "bitmaps", &image.lists.bitmaps, |bitmap| {
        let name = printable(&bitmap.name);
        if consistent && bitmap.is_usable() { name } else { format!("{name} (not usable)") }
    });
    lines
}

fn features(header: &Header) -> String {
    let kib = header.cluster_bytes() as f64 / 1024.0;
    let mut text = format!("clusters of {kib} KiB, {}-bit refcounts", 1 << header.refcount_order);
    let named = [
        (header.has(feature::EXTENDED_L2), ", extended L2 entries"),
        (header.compression() == Compression::Zstd, ", zstd"),
        (header.compatible & feature::LAZY_REFCOUNTS != 0, ", lazy refcounts"),
    ];
    named.iter().filter(|(has, _)| *has).for_each(|(_, name)| text.push_str(name));
    text
}

fn add_list<T>(
    lines: &mut Vec<(&'static str, String)>,
    what: &'static str,
    list: &List<T>,
    name: impl Fn(&T) -> String,
) {
    if list.count == 0 {
        return;
    }
    let names: Vec<String> = list.entries.iter().map(name).collect();
    let mut text = format!("{}: {}", list.count, names.join(", "));
    if let Some(fault) = &list.fault {
        text.push_str(&format!(" (the rest cannot be read: {fault})"));
    }
    lines.push((what, text));
}
