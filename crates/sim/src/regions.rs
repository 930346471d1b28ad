//! Which part of a VHD a write goes to: for breaking one ordering rule of the format at a time.

use std::ops::Range;

use spile_core::Via;
use spile_image::formats::vhd::codec::bat;
use spile_image::formats::vhd::codec::batmap::BatmapHeader;
use spile_image::formats::vhd::codec::header::Header;

use crate::faults::{How, Touch};
use crate::pages::Pages;

/// A part of a dynamic or differencing VHD, as [`spile_image::formats::vhd`] lays it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The footer's copy at the start, and the header.
    Head,
    /// The block allocation table.
    Bat,
    /// The batmap's header.
    BatmapHeader,
    /// The batmap.
    Batmap,
    /// The journal between the batmap's header and the batmap.
    Journal,
    /// A block's sector bitmap.
    Bitmap,
    /// A block's data.
    Data,
    /// The footer at the end.
    TrailingFooter,
    /// Zeroes or a hole over more than one part, as when a block is released.
    Block,
    /// The length of the file.
    Length,
}

/// The part that `touch` changes, by what the file holds; `None` when that is no such VHD.
pub fn part_of(view: &Pages, touch: &Touch) -> Option<Part> {
    let mut bytes = [0; Header::LEN];
    view.read(512, &mut bytes);
    let header = Header::parse(&bytes).ok()?;
    if touch.how == How::SetLen {
        return Some(Part::Length);
    }
    let at = touch.range.start;
    let bat_end = header.bat_end_bytes();
    if at < header.bat_offset_bytes {
        return Some(Part::Head);
    }
    if at < bat_end {
        return Some(Part::Bat);
    }
    in_batmap(view, bat_end, at).or_else(|| Some(behind(&header, touch)))
}

/// True when `touch` empties a batmap: its map or the header of an empty map is written.
pub fn empties_batmap(view: &Pages, touch: &Touch) -> bool {
    match part_of(view, touch) {
        Some(Part::Batmap) => touch.bytes.iter().all(|byte| *byte == 0),
        Some(Part::BatmapHeader) => BatmapHeader::parse(&touch.bytes)
            .is_ok_and(|header| header.checksum == BatmapHeader::checksum_of(header.version, &[])),
        _ => false,
    }
}

fn in_batmap(view: &Pages, header_at: u64, at: u64) -> Option<Part> {
    let mut bytes = [0; BatmapHeader::LEN];
    view.read(header_at, &mut bytes);
    let batmap = BatmapHeader::parse(&bytes).ok()?;
    let within = |range: Range<u64>| range.contains(&at);
    if within(header_at..header_at + BatmapHeader::LEN as u64) {
        Some(Part::BatmapHeader)
    } else if within(batmap.gap_bytes(header_at)) {
        Some(Part::Journal)
    } else if within(batmap.map_bytes()) {
        Some(Part::Batmap)
    } else {
        None
    }
}

/// The part behind the metadata that `touch` changes: a block or the footer. Only data are written directly.
fn behind(header: &Header, touch: &Touch) -> Part {
    let bitmap_bytes = u64::from(bat::bitmap_bytes(header.block_size_bytes));
    let len = touch.range.end - touch.range.start;
    match touch.how {
        How::Write(Via::Direct) => Part::Data,
        How::Zero if len == bitmap_bytes + u64::from(header.block_size_bytes) => Part::Block,
        How::Zero => Part::Data,
        How::Write(Via::Cached) if touch.bytes.starts_with(b"conectix") => Part::TrailingFooter,
        How::Write(Via::Cached) if len == bitmap_bytes => Part::Bitmap,
        How::Write(Via::Cached) | How::SetLen => Part::Data,
    }
}
