//! The codecs on bytes that other programs wrote: QEMU (`qemu-img create -f vpc`, plain, fixed, `force_size`) and
//! blktap (`vhd-util create`, `snapshot`). The vectors are seeds of the fuzz corpus as well.

use std::path::Path;

use spile_image::formats::vhd::codec::batmap::BatmapHeader;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::header::Header;
use spile_image::formats::vhd::codec::locator::{Locator, Platform, encode};
use spile_image::formats::vhd::codec::{CodecError, geometry::Geometry};

fn vector(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn footer(name: &str) -> Footer {
    let bytes = vector(&format!("vhd_footer/{name}"));
    let footer = Footer::parse(&bytes).unwrap();
    assert_eq!(footer.to_bytes()[..bytes.len()], bytes, "written again, it is the same");
    footer
}

fn header(name: &str) -> Header {
    let bytes = vector(&format!("vhd_header/{name}"));
    let header = Header::parse(&bytes).unwrap();
    assert_eq!(header.to_bytes()[..], bytes, "written again, it is the same");
    header
}

#[test]
fn qemu_rounds_up_to_its_geometry() {
    let footer = footer("qemu-dynamic");
    assert_eq!((&footer.creator, footer.disk_type), (b"qemu", DiskType::Dynamic));
    assert_eq!(footer.geometry, Geometry { cylinders: 2081, heads: 16, sectors: 63 });
    assert_eq!(footer.current_size_bytes, 1_073_995_776);
    assert_eq!((footer.data_offset, &footer.creator_os), (Some(512), b"Wi2k"));
    assert!(!footer.may_have_batmap());
    let header = header("qemu-dynamic");
    assert_eq!((header.bat_offset_bytes, header.max_entries), (1536, 513));
    assert_eq!(header.block_size_bytes, 2 << 20);
}

#[test]
fn qemu_with_force_size_means_the_current_size() {
    let footer = footer("qemu-force-size");
    assert_eq!((&footer.creator, footer.geometry.is_max()), (b"qem2", true));
    assert_eq!(footer.current_size_bytes, 1 << 30);
}

#[test]
fn a_fixed_disk_of_qemu() {
    let footer = footer("qemu-fixed");
    assert_eq!((footer.disk_type, footer.data_offset), (DiskType::Fixed, None));
    assert_eq!(footer.current_size_bytes, footer.geometry.size_bytes());
    assert_eq!(footer.current_size_bytes, 31 * 4 * 17 * 512);
}

#[test]
fn blktap_writes_the_dialect_that_we_write() {
    let footer = footer("blktap-dynamic");
    assert_eq!(footer.creator, Footer::CREATOR);
    assert_eq!(footer.creator_version, Footer::CREATOR_VERSION);
    assert_eq!(footer.geometry, Geometry::for_size(1 << 30));
    let mine = Footer { timestamp: footer.timestamp, ..Footer::new(DiskType::Dynamic, 1 << 30, footer.uuid, 0) };
    assert_eq!(mine, footer);
}

#[test]
fn a_child_of_blktap_names_its_parent_in_three_ways() {
    let child = footer("blktap-child");
    assert_eq!(child.disk_type, DiskType::Differencing);
    let header = header("blktap-child");
    assert_eq!(header.parent_name, "p.vhd");
    assert_eq!(header.parent_uuid, footer("blktap-dynamic").uuid);
    let platforms = header.locators.clone().map(|locator| locator.platform);
    assert_eq!(platforms[..4], [Platform::MacX, Platform::W2ku, Platform::W2ru, Platform::None]);
    for (platform, name) in platforms.into_iter().zip(["macx", "w2ku", "w2ru"]) {
        let bytes = vector(&format!("vhd_locator/blktap-{name}"));
        let (entry, text) = bytes.split_first_chunk::<24>().unwrap();
        let locator = Locator::parse(entry);
        assert_eq!((locator.platform, locator.space_bytes()), (platform, 512));
        assert_eq!(locator.decode(text).as_deref(), Ok("./p.vhd"));
        assert_eq!(encode(platform, "p.vhd"), text);
    }
}

#[test]
fn an_empty_batmap_of_blktap_is_ours() {
    let bytes = vector("vhd_batmap/blktap");
    let header = BatmapHeader::parse(&bytes[..512]).unwrap();
    assert_eq!(header, BatmapHeader::void(4096, 512));
    assert!(header.matches(&[0; 512], 1 << 30) && !header.is_encrypted());
    assert_eq!(header.to_bytes()[..], bytes[..512]);
}

#[test]
fn damaged_vectors_are_refused_by_name() {
    let footer = |name: &str| Footer::parse(&vector(&format!("vhd_footer/{name}"))).unwrap_err();
    assert_eq!(footer("poisoned"), CodecError::Poisoned);
    assert_eq!(footer("size-too-large"), CodecError::SizeTooLarge(u64::MAX));
    assert_eq!(footer("tap-0.1"), CodecError::OldBitmapOrder(1));
    let header = |name: &str| Header::parse(&vector(&format!("vhd_header/{name}"))).unwrap_err();
    assert_eq!(header("block-size-0"), CodecError::BlockSize(0));
    assert_eq!(header("block-size-0x80"), CodecError::BlockSize(0x80));
    assert_eq!(header("block-size-huge"), CodecError::BlockSize(1 << 31));
    assert_eq!(header("bat-wraps"), CodecError::BatOffset(u64::MAX));
    assert_eq!(header("bat-over-footer"), CodecError::BatOffset(0));
    assert!(matches!(header("entries-0"), CodecError::BatEntries { entries: 0, .. }));
    assert!(matches!(header("entries-huge"), CodecError::BatEntries { entries: u32::MAX, .. }));
}
