//! Each format on block devices with sectors of 512 and of 4096 bytes, through the page cache and past it.

#[path = "../../../engine/tests/common/loop_device.rs"]
mod loop_device;

use std::fs::{self, File};
use std::path::Path;

use loop_device::LoopDevice;

use crate::common::nbd::Client;
use crate::common::{Served, ok, run};

const MIB: u64 = 1 << 20;
const DEVICE_BYTES: u64 = 8 * MIB;
/// No whole number of pages; the last sector of a device of large sectors is shared.
const DISK_BYTES: u64 = 3 * MIB + 512;

/// A format, and what a conversion to it says besides.
const KINDS: [(&str, &[&str]); 6] = [
    ("raw", &[]),
    ("vhd", &[]),
    ("vhd", &["--subformat", "fixed"]),
    ("qcow2", &["--cluster-size", "512"]),
    ("qcow2", &["--cluster-size", "4k"]),
    ("qcow2", &["--cluster-size", "64k", "--extended-l2", "on"]),
];

fn noise(len: u64) -> Vec<u8> {
    let mut word = 88_172_645_463_325_252_u64;
    let next = |_| {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word as u8 | 1
    };
    (0..len).map(next).collect()
}

/// A device of these sectors whose every byte is 7; the error says why there is none.
fn device(dir: &Path, sector_bytes: u32) -> Result<LoopDevice, String> {
    let file = dir.join("device");
    fs::write(&file, vec![7; DEVICE_BYTES as usize]).unwrap();
    LoopDevice::with_sectors(&file, sector_bytes)
}

/// Changes a disk that is served, on sectors, across them and within one; what it holds then.
fn change(client: &Client, mut disk: Vec<u8>) -> Vec<u8> {
    for (start, len) in [(0, 65_536), (MIB + 512, 4096), (2 * MIB - 3, 7), (disk.len() as u64 - 512, 512)] {
        client.write(start, &vec![9; len as usize], false).unwrap();
        disk[start as usize..(start + len) as usize].fill(9);
    }
    for (start, len) in [(65_536, 65_536), (MIB + 8192 + 512, 9000), (2 * MIB + 1, 3), (2 * MIB + 100, MIB / 2)] {
        client.write_zeroes(start, len).unwrap();
        disk[start as usize..(start + len) as usize].fill(0);
    }
    client.flush().unwrap();
    disk
}

#[test]
fn each_format_works_on_a_device_of_any_sectors() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = dir.path();
    let source = noise(DISK_BYTES);
    fs::write(dir.join("a.raw"), &source).unwrap();
    for sector_bytes in [512, 4096] {
        for (format, options) in KINDS {
            for cache in ["page", "direct"] {
                let what = format!("{format} {options:?} on sectors of {sector_bytes}, {cache}");
                let device = match device(dir, sector_bytes) {
                    Ok(device) => device,
                    Err(why) => return println!("SKIP each_format_works_on_a_device_of_any_sectors: {why}"),
                };
                let path = device.path.as_str();
                let convert = ["convert", "a.raw", path, "--onto", "--cache", cache, "--to", format];
                ok(dir, &[&convert[..], options].concat());
                let served =
                    Served::start(dir, &[&format!("{path},format={format}"), "--cache", cache, "--control", "none"]);
                let client = Client::connect(&served.uri()).unwrap();
                let mut read = vec![0; client.facts().size_bytes as usize];
                client.read(0, &mut read).unwrap();
                let mut expected = source.clone();
                // A raw device has zeroes behind the disk.
                expected.resize(read.len(), 0);
                assert!(read == expected, "{what}: the copy");
                let expected = change(&client, expected);
                client.read(0, &mut read).unwrap();
                assert!(read == expected, "{what}: after changes");
                drop(client);
                assert!(served.terminate().success(), "{what}");
                let checked = run(dir, &["check", path, "--format", format]);
                assert!(matches!(checked.status.code(), Some(0 | 4)), "{what}: {checked:?}");
                let back = dir.join("back.raw");
                ok(dir, &["convert", path, "back.raw", "--from", format]);
                assert!(fs::read(&back).unwrap() == expected, "{what}: closed and opened");
                fs::remove_file(back).unwrap();
            }
        }
    }
}

#[test]
fn what_measure_says_is_enough_for_a_device() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = dir.path();
    let kinds: [(&str, &[&str]); 6] = [
        ("vhd", &[]),
        ("vhd", &["--subformat", "fixed"]),
        ("raw", &[]),
        ("qcow2", &[]),
        ("qcow2", &["--cluster-size", "512"]),
        ("qcow2", &["--cluster-size", "2M"]),
    ];
    for mib in [1, 2, 8] {
        fs::write(dir.join("a.raw"), noise(mib * MIB)).unwrap();
        for (format, options) in kinds {
            let measured = crate::common::json(dir, &[&["measure", "a.raw", "--to", format][..], options].concat());
            let bytes = measured["file_bytes"].as_u64().unwrap();
            let file = dir.join("device");
            let _ = fs::remove_file(&file);
            File::create(&file).unwrap().set_len(bytes.next_multiple_of(512)).unwrap();
            let device = match LoopDevice::over(&file) {
                Ok(device) => device,
                Err(why) => return println!("SKIP what_measure_says_is_enough_for_a_device: {why}"),
            };
            for cache in ["page", "direct"] {
                let convert = ["convert", "a.raw", &device.path, "--onto", "--cache", cache, "--to", format];
                ok(dir, &[&convert[..], options].concat());
                ok(dir, &["compare", "a.raw", &device.path, "--to", format]);
            }
        }
    }
}
