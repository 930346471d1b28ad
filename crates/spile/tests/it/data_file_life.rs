//! The life of disks whose data lie in another file: takeovers under load, with a bitmap in the image as well; backups; other parents.

use crate::common::guests::{Load, nbd, serve, succeed};
use crate::common::host::{bytes_by, bytes_of};
use crate::common::nbd::Client;
use crate::common::{have, json, ok, qemu_img, run};

const MIB: usize = 1 << 20;
const ALLOW: &str = "--allow-data-file";
/// How an image gets its data file: raw, or not.
const KINDS: [&[&str]; 2] = [&["--data-file", "d.raw", "--data-file-raw"], &["--data-file", "d.raw"]];

/// True when `changed` counts all of the disk from `offset` on, `len` bytes.
fn counts(changed: &serde_json::Value, offset: u64, len: u64) -> bool {
    changed["ranges"].as_array().unwrap().iter().any(|range| {
        let (at, len_bytes) = (range["offset_bytes"].as_u64().unwrap(), range["length_bytes"].as_u64().unwrap());
        at <= offset && offset + len <= at + len_bytes
    })
}

#[test]
fn a_bitmap_in_the_image_goes_over_to_successors_under_load() {
    if !have("qemu-img", "a_bitmap_in_the_image_goes_over_to_successors_under_load") {
        return;
    }
    for kind in [&[][..], KINDS[0], KINDS[1]] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ok(dir, &[&["create", "d.qcow2", "--size", "64M"], kind].concat());
        qemu_img(dir, &["bitmap", "--add", "d.qcow2", "b"]);
        let args = ["d.qcow2", "--vhost-user", "v", "--nbd", "unix:n", "--queues", "2", ALLOW];
        let mut served = serve(dir, &args);
        let mut load = Load::start(dir, "v", &["--queues", "2", "--span", "16M"]);
        load.goes_on(&served);
        for round in 0..4_u8 {
            let at = (40 + 4 * u64::from(round)) << 20;
            Client::connect(&nbd(dir, "")).unwrap().write(at, &[round + 1; 4096], false).unwrap();
            served = succeed(dir, &args, served);
            load.goes_on(&served);
            let told = json(dir, &["changed", "c", "--since", "b"]);
            assert!(counts(&told, at, 4096) && told["warning"].is_null(), "{told}");
        }
        assert_eq!(load.end(), 0);
        assert!(served.terminate().success());
        qemu_img(dir, &["check", "-q", "d.qcow2"]);
        let info = qemu_img(dir, &["info", "--output=json", "d.qcow2"]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
        assert_eq!((&bitmap["name"], &bitmap["flags"]), (&"b".into(), &serde_json::json!(["auto"])), "{info}");
        let told = json(dir, &["changed", "d.qcow2", "--since", "b", ALLOW]);
        for round in 0..4 {
            assert!(counts(&told, (40 + 4 * round) << 20, 4096), "{told}");
        }
        // Nobody has written there.
        assert!(told["changed_bytes"].as_u64().unwrap() <= (16 << 20) + 4 * (64 << 10), "{told}");
    }
}

#[test]
fn backups_of_a_disk_in_use_hold_what_its_data_file_held() {
    for kind in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        ok(dir, &[&["create", "d.qcow2", "--size", "16M"], kind].concat());
        let served = serve(dir, &["d.qcow2", "--nbd", "unix:n", ALLOW]);
        let client = Client::connect(&nbd(dir, "")).unwrap();
        let mut bytes = vec![0; 16 * MIB];
        let mut write = |offset: usize, len: usize, byte: u8| {
            client.write(offset as u64, &vec![byte; len], false).unwrap();
            bytes[offset..offset + len].fill(byte);
            bytes.clone()
        };
        let sunday = write(MIB, 3 * MIB, 2);
        ok(dir, &["backup", "c", "sun.vhd", "--checkpoint", "sunday", "--wait"]);
        write(2 * MIB, MIB, 0);
        let monday = write(9 * MIB + 512, 70_000, 4);
        ok(dir, &["backup", "c", "mon.vhd", "--since", "sunday", "--parent", "sun.vhd", "--wait"]);
        write(MIB, 4096, 9);
        drop(client);
        assert!(served.terminate().success());
        assert!(bytes_of(dir, "sun.vhd") == sunday, "the first backup holds something else");
        assert!(bytes_of(dir, "mon.vhd") == monday, "the second backup holds something else");
        assert!(json(dir, &["info", "mon.vhd"])["used_bytes"].as_u64().unwrap() < 3 * MIB as u64);
    }
}

#[test]
fn a_disk_with_a_data_file_gets_another_parent_that_reads_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let write = |disk: &str, at: usize, byte: u8| {
        let served = serve(dir, &[disk, "--nbd", "unix:n", ALLOW, "--write-parent"]);
        Client::connect(&nbd(dir, "")).unwrap().write(at as u64, &vec![byte; MIB], false).unwrap();
        assert!(served.terminate().success());
    };
    ok(dir, &["create", "one.qcow2", "--size", "16M"]);
    write("one.qcow2", MIB, 1);
    ok(dir, &["convert", "one.qcow2", "two.qcow2"]);
    ok(dir, &["create", "d.qcow2", "--parent", "one.qcow2", "--data-file", "d.raw"]);
    write("d.qcow2", 3 * MIB, 2);
    let content = || bytes_by(dir, "d.qcow2", &[ALLOW]);
    let before = content();
    ok(dir, &["rebase", "d.qcow2", "--parent", "two.qcow2", ALLOW]);
    let parent = json(dir, &["info", "d.qcow2", "--chain", ALLOW])["layers"][1]["path"].as_str().unwrap().to_owned();
    assert!(parent.ends_with("two.qcow2"), "{parent}");
    assert!(content() == before, "the disk reads otherwise");
    // One that reads otherwise is refused, and what differs is copied into the data file when that is asked for.
    ok(dir, &["create", "three.qcow2", "--size", "16M"]);
    let refused = run(dir, &["rebase", "d.qcow2", "--parent", "three.qcow2", ALLOW]);
    assert!(!refused.status.success() && content() == before, "{refused:?}");
    ok(dir, &["rebase", "d.qcow2", "--parent", "three.qcow2", "--copy", ALLOW]);
    assert!(content() == before, "the disk reads otherwise");
    assert_eq!(json(dir, &["check", "d.qcow2", ALLOW])["result"], "sound");
}
