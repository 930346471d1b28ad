//! A qcow2 disk's life as its users meet it: snapshots, clones, merges, flattens, sizes, collections, backups and moves. qemu-img checks
//! and compares each result.

use std::fs;
use std::path::Path;

use crate::common::guests::Load;
use crate::common::host::{bytes_of, names, serve};
use crate::common::moves::{job, receive, to};
use crate::common::nbd::Client;
use crate::common::{eventually, fails, have, json, ok, qemu_img};
use nix::sys::signal::Signal;

const MIB: u64 = 1 << 20;

/// What the disk holds, after qemu-img has checked each of its images, and has compared it with what Spile reads.
fn sound(dir: &Path, disk: &str) -> Vec<u8> {
    let info = json(dir, &["info", disk, "--chain"]);
    for layer in info["layers"].as_array().unwrap() {
        qemu_img(dir, &["check", "-q", layer["path"].as_str().unwrap()]);
    }
    let bytes = bytes_of(dir, disk);
    fs::write(dir.join("seen.img"), &bytes).unwrap();
    qemu_img(dir, &["compare", "-q", "-f", "raw", "-F", "qcow2", "seen.img", disk]);
    fs::remove_file(dir.join("seen.img")).unwrap();
    bytes
}

/// The file names of a disk's layers, leaf first.
fn chain(dir: &Path, disk: &str) -> Vec<String> {
    let info = json(dir, &["info", disk, "--chain"]);
    let name = |layer: &serde_json::Value| layer["path"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    info["layers"].as_array().unwrap().iter().map(name).collect()
}

/// Makes NAME.qcow2 of 16 MiB over s2.qcow2 over s1.qcow2, each with something of its own, of which a part is zeroes that hide what lies below.
fn make(dir: &Path, name: &str) {
    let image = format!("{name}.qcow2");
    qemu_img(dir, &["create", "-q", "-f", "qcow2", &image, "16M"]);
    let served = serve(dir, &[&image]);
    let client = Client::connect(&served.uri()).unwrap();
    for (number, snapshot) in [(1_u8, Some("s1.qcow2")), (2, Some("s2.qcow2")), (3, None)] {
        client.write(u64::from(number) * MIB + 4096, &vec![number; 3 << 20], true).unwrap();
        client.write(u64::from(number) * MIB, &[0; 70 << 10], true).unwrap();
        client.write(10 * MIB + u64::from(number) * 6000 / 512 * 512, &[number; 512], true).unwrap();
        if let Some(snapshot) = snapshot {
            ok(dir, &["snapshot", name, "--name", snapshot]);
        }
    }
    drop(client);
    assert!(served.terminate().success());
}

#[test]
fn snapshots_clones_merges_and_a_flatten_of_a_disk_that_nobody_uses() {
    if !have("qemu-img", "snapshots_clones_merges_and_a_flatten_of_a_disk_that_nobody_uses") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-alone");
    let disk = "q-alone.qcow2";
    let bytes = sound(dir, disk);
    assert_eq!(chain(dir, disk), [disk, "s2.qcow2", "s1.qcow2"]);
    assert!(json(dir, &["info", disk])["format_specific"]["extended_l2"] != false, "a new leaf has subclusters");
    ok(dir, &["snapshot", disk, "--name", "s3.qcow2"]);
    ok(dir, &["clone", "s3.qcow2", "clone.qcow2"]);
    assert_eq!(chain(dir, "clone.qcow2"), ["clone.qcow2", "s3.qcow2", "s2.qcow2", "s1.qcow2"]);
    assert!(sound(dir, "clone.qcow2") == bytes);
    // A layer with two children: both name its parent afterwards.
    ok(dir, &["coalesce", disk, "--layer", "s3"]);
    assert_eq!(chain(dir, disk), [disk, "s2.qcow2", "s1.qcow2"]);
    assert_eq!(chain(dir, "clone.qcow2"), ["clone.qcow2", "s2.qcow2", "s1.qcow2"]);
    assert!(sound(dir, disk) == bytes && sound(dir, "clone.qcow2") == bytes);
    // The leaf's parent has another child.
    assert!(fails(dir, 1, &["coalesce", disk]).contains("clone.qcow2"));
    ok(dir, &["flatten", "clone.qcow2"]);
    assert_eq!(chain(dir, "clone.qcow2"), ["clone.qcow2"]);
    assert!(sound(dir, "clone.qcow2") == bytes);
    ok(dir, &["coalesce", disk, "--layer", "s2"]);
    ok(dir, &["coalesce", disk]);
    assert_eq!(chain(dir, disk), [disk]);
    assert!(sound(dir, disk) == bytes);
    assert_eq!(names(dir).into_iter().filter(|name| !name.starts_with('.')).collect::<Vec<_>>(), ["clone.qcow2", disk]);
}

#[test]
fn merges_and_a_flatten_under_load() {
    if !have("qemu-img", "merges_and_a_flatten_under_load") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "q-load.qcow2", "--size", "16M"]);
    let served = serve(dir, &["q-load.qcow2", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "6M"]);
    for round in 0..2 {
        for number in 0..3 {
            load.goes_on(&served);
            ok(dir, &["snapshot", "q-load", "--name", &format!("s{number}.qcow2")]);
        }
        load.goes_on(&served);
        ok(dir, &["coalesce", "q-load", "--layer", "s1", "--wait"]);
        load.goes_on(&served);
        match round {
            0 => drop(ok(dir, &["coalesce", "q-load", "--wait"])),
            _ => drop(ok(dir, &["flatten", "q-load", "--wait"])),
        }
        load.goes_on(&served);
        ok(dir, &["flatten", "q-load", "--wait"]);
        let left: Vec<_> =
            names(dir).into_iter().filter(|name| name.starts_with('s') && name.ends_with(".qcow2")).collect();
        left.iter().for_each(|name| fs::remove_file(dir.join(name)).unwrap());
    }
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    assert_eq!(chain(dir, "q-load.qcow2"), ["q-load.qcow2"]);
    sound(dir, "q-load.qcow2");
}

#[test]
fn a_merge_that_was_killed_goes_on() {
    if !have("qemu-img", "a_merge_that_was_killed_goes_on") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-kill");
    let bytes = sound(dir, "q-kill.qcow2");
    for layer in [Some("s2"), None] {
        let served = serve(dir, &["q-kill.qcow2"]);
        let layer = layer.map(|layer| ["--layer", layer]).into_iter().flatten();
        let args: Vec<_> = ["coalesce", "q-kill", "--rate", "1M", "--background"].into_iter().chain(layer).collect();
        ok(dir, &args);
        std::thread::sleep(std::time::Duration::from_millis(700));
        served.signal(Signal::SIGKILL);
        drop(served);
        ok(dir, &["gc", "."]);
        assert!(sound(dir, "q-kill.qcow2") == bytes);
    }
    assert_eq!(chain(dir, "q-kill.qcow2"), ["q-kill.qcow2"]);
}

#[test]
fn a_disk_gets_another_parent() {
    if !have("qemu-img", "a_disk_gets_another_parent") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-base");
    let bytes = sound(dir, "q-base.qcow2");
    for parent in ["flat.raw", "flat.vhd", "flat.qcow2"] {
        ok(dir, &["convert", "s2.qcow2", parent]);
        ok(dir, &["rebase", "q-base.qcow2", "--parent", parent]);
        assert_eq!(chain(dir, "q-base.qcow2"), ["q-base.qcow2", parent]);
        assert!(bytes_of(dir, "q-base.qcow2") == bytes);
    }
    assert!(sound(dir, "q-base.qcow2") == bytes);
}

#[test]
fn a_disk_becomes_longer_while_it_is_served_and_shorter_while_it_is_not() {
    if !have("qemu-img", "a_disk_becomes_longer_while_it_is_served_and_shorter_while_it_is_not") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "q-size.qcow2", "1M"]);
    let served = serve(dir, &["q-size.qcow2"]);
    ok(dir, &["resize", "q-size", "40M"]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(40 * MIB - 4096, &[7; 4096], true).unwrap();
    client.write(0, &[8; 4096], true).unwrap();
    drop(client);
    ok(dir, &["snapshot", "q-size", "--name", "s.qcow2"]);
    ok(dir, &["resize", "q-size", "3G"]);
    assert!(served.terminate().success());
    ok(dir, &["coalesce", "q-size.qcow2"]);
    ok(dir, &["resize", "q-size.qcow2", "50M", "--shrink"]);
    let bytes = sound(dir, "q-size.qcow2");
    assert_eq!((bytes.len() as u64, bytes[0], bytes[40 * MIB as usize - 1]), (50 * MIB, 8, 7));
    assert!(fails(dir, 2, &["resize", "q-size.qcow2", "20M", "--shrink"]).contains("has data behind"));
    ok(dir, &["resize", "q-size.qcow2", "20M", "--shrink", "--discard"]);
    ok(dir, &["resize", "q-size.qcow2", "40M"]);
    let bytes = sound(dir, "q-size.qcow2");
    assert!(bytes[0] == 8 && bytes[4096..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_deleted_snapshot_goes_with_the_collection_and_what_others_need_stays() {
    if !have("qemu-img", "a_deleted_snapshot_goes_with_the_collection_and_what_others_need_stays") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-gc");
    let (disk, first) = (sound(dir, "q-gc.qcow2"), sound(dir, "s1.qcow2"));
    ok(dir, &["delete", "s2.qcow2"]);
    ok(dir, &["gc", "."]);
    assert_eq!(chain(dir, "q-gc.qcow2"), ["q-gc.qcow2", "s1.qcow2"]);
    assert!(sound(dir, "q-gc.qcow2") == disk && sound(dir, "s1.qcow2") == first);
    // Another program's overlay, whose name says no format, needs it, too.
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "-b", "s1.qcow2", "-F", "qcow2", "vm.snapshot1"]);
    assert!(ok(dir, &["gc", "."]).contains("nothing to do"));
    ok(dir, &["flatten", "q-gc.qcow2"]);
    assert!(fails(dir, 1, &["delete", "s1.qcow2"]).contains("vm.snapshot1"));
    assert!(dir.join("s1.qcow2").exists(), "an image is gone that another one needs");
    qemu_img(dir, &["check", "-q", "vm.snapshot1"]);
    // So does one whose name says raw, as libvirt's overlays often have it.
    fs::rename(dir.join("vm.snapshot1"), dir.join("vm.img")).unwrap();
    let said = fails(dir, 1, &["delete", "s1.qcow2"]);
    assert!(said.contains("vm.img") && said.contains("its name says raw"), "{said}");
    qemu_img(dir, &["check", "-q", "-f", "qcow2", "vm.img"]);
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "-b", "s1.qcow2", "-F", "qcow2", "other.img"]);
    assert!(fails(dir, 1, &["delete", "s1.qcow2"]).contains("its name says raw"));
    fs::remove_file(dir.join("other.img")).unwrap();
    // One that only QEMU understands may need anything.
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "lone.qcow2", "1M"]);
    let name = "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"lone.qcow2\"}}";
    qemu_img(dir, &["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "qcow2", "strange.qcow2", "1M"]);
    assert!(fails(dir, 1, &["delete", "lone.qcow2"]).contains("strange.qcow2"));
    fs::remove_file(dir.join("strange.qcow2")).unwrap();
    ok(dir, &["delete", "lone.qcow2"]);
    assert!(!dir.join("lone.qcow2").exists());
}

#[test]
fn a_child_that_knows_its_parent_by_content_keeps_it_from_being_merged() {
    if !have("qemu-img", "a_child_that_knows_its_parent_by_content_keeps_it_from_being_merged") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-mixed");
    ok(dir, &["clone", "q-mixed.qcow2", "over.vhd"]);
    let bytes = bytes_of(dir, "over.vhd");
    for layer in ["q-mixed", "s2"] {
        let said = fails(dir, 1, &["coalesce", "over.vhd", "--layer", layer]);
        assert!(said.contains("over.vhd") && said.contains("what lies where"), "{said}");
    }
    assert!(bytes_of(dir, "over.vhd") == bytes);
    ok(dir, &["flatten", "over.vhd"]);
    ok(dir, &["coalesce", "q-mixed.qcow2", "--layer", "s2"]);
    assert!(sound(dir, "q-mixed.qcow2") == bytes && bytes_of(dir, "over.vhd") == bytes);
}

#[test]
fn backups_and_moves_are_made_of_and_into_qcow2() {
    if !have("qemu-img", "backups_and_moves_are_made_of_and_into_qcow2") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-goes");
    let bytes = sound(dir, "q-goes.qcow2");
    fs::create_dir(dir.join("new")).unwrap();
    let served = serve(dir, &["q-goes.qcow2"]);
    ok(dir, &["backup", "q-goes", "full.qcow2", "--checkpoint", "c1", "--wait"]);
    assert!(sound(dir, "full.qcow2") == bytes);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(15 * MIB, &[9; 4096], true).unwrap();
    drop(client);
    ok(dir, &["backup", "q-goes", "second.qcow2", "--since", "c1", "--parent", "full.qcow2", "--wait"]);
    let changed = sound(dir, "second.qcow2");
    assert!(changed[15 * MIB as usize] == 9 && changed[..15 * MIB as usize] == bytes[..15 * MIB as usize]);
    ok(dir, &["verify", "second.qcow2"]);
    ok(dir, &["move", "q-goes", "--to", "new/q-goes.qcow2", "--wait"]);
    assert!(served.terminate().success());
    assert_eq!(chain(dir, "new/q-goes.qcow2"), ["q-goes.qcow2"]);
    assert!(sound(dir, "new/q-goes.qcow2") == changed);
}

#[test]
fn a_disk_is_moved_with_its_chain() {
    if !have("qemu-img", "a_disk_is_moved_with_its_chain") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir_all(dir.join("old")).unwrap();
    fs::create_dir_all(dir.join("new")).unwrap();
    make(&dir.join("old"), "q-keeps");
    let bytes = sound(&dir.join("old"), "q-keeps.qcow2");
    ok(dir, &["move", "old/q-keeps.qcow2", "--to", "new", "--chain", "keep"]);
    assert_eq!(chain(dir, "new/q-keeps.qcow2"), ["q-keeps.qcow2", "s2.qcow2", "s1.qcow2"]);
    fs::remove_dir_all(dir.join("old")).unwrap();
    assert!(sound(&dir.join("new"), "q-keeps.qcow2") == bytes);
}

#[test]
fn another_host_takes_a_disk_in_as_qcow2_over_kills_of_both() {
    if !have("qemu-img", "another_host_takes_a_disk_in_as_qcow2_over_kills_of_both") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir_all(dir.join("there")).unwrap();
    make(dir, "q-far");
    let mut bytes = sound(dir, "q-far.qcow2");
    let mut there = receive(dir);
    let mut served = serve(dir, &["q-far.qcow2"]);
    json(dir, &["move", "q-far", "--to", &to(dir, "disk.qcow2"), "--rate", "1M", "--background"]);
    for killed in ["there", "here"] {
        let before = job(dir, "q-far")["done_bytes"].as_u64();
        eventually("some more is copied", || job(dir, "q-far")["done_bytes"].as_u64() > before);
        let at = if killed == "here" { 2 } else { 12 };
        Client::connect(&served.uri()).unwrap().write(at * MIB, &[77; 8192], true).unwrap();
        bytes[(at * MIB) as usize..][..8192].fill(77);
        match killed {
            "there" => {
                there.kill();
                there = receive(dir);
            }
            _ => {
                served.kill();
                served = serve(dir, &["q-far.qcow2"]);
            }
        }
    }
    eventually("it goes on", || job(dir, "q-far")["state"] == "running");
    ok(dir, &["job", job(dir, "q-far")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "q-far")["state"] == "done");
    assert!(served.terminate().success() && there.terminate().success());
    // A process that was killed may leave clusters that nothing uses.
    ok(dir, &["check", "--repair", "there/disk.qcow2"]);
    assert_eq!(chain(dir, "there/disk.qcow2"), ["disk.qcow2"]);
    assert!(sound(dir, "there/disk.qcow2") == bytes);
}

#[test]
fn an_image_with_snapshots_inside_it_keeps_its_file_and_its_parent() {
    if !have("qemu-img", "an_image_with_snapshots_inside_it_keeps_its_file_and_its_parent") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make(dir, "q-inner");
    qemu_img(dir, &["snapshot", "-c", "inside", "s2.qcow2"]);
    qemu_img(dir, &["snapshot", "-c", "inside", "q-inner.qcow2"]);
    let bytes = sound(dir, "q-inner.qcow2");
    for refused in [
        &["coalesce", "q-inner.qcow2"][..],
        &["coalesce", "q-inner.qcow2", "--layer", "s2"],
        &["flatten", "q-inner.qcow2"],
        &["rebase", "q-inner.qcow2", "--parent", "s1.qcow2"],
    ] {
        let said = fails(dir, 1, refused);
        assert!(
            said.contains("snapshots inside it") && said.contains("spile internal-snapshot"),
            "{refused:?}: {said}"
        );
    }
    assert_eq!(chain(dir, "q-inner.qcow2"), ["q-inner.qcow2", "s2.qcow2", "s1.qcow2"]);
    assert!(sound(dir, "q-inner.qcow2") == bytes);
    // One below keeps its own while another image is merged into it.
    qemu_img(dir, &["snapshot", "-d", "inside", "q-inner.qcow2"]);
    ok(dir, &["coalesce", "q-inner.qcow2"]);
    assert!(sound(dir, "q-inner.qcow2") == bytes);
    let inside = fs::read(dir.join("q-inner.qcow2")).unwrap();
    assert!(inside.windows(6).any(|at| at == b"inside"));
}

#[test]
fn a_parent_that_cannot_grow_is_refused_before_a_merge_begins() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "old.qcow2", "--size", "8M", "-o", "compat=0.10"]);
    ok(dir, &["internal-snapshot", "old.qcow2", "--create", "inside"]);
    ok(dir, &["create", "longer.qcow2", "--parent", "old.qcow2"]);
    ok(dir, &["resize", "longer.qcow2", "16M"]);
    let files = || ["old.qcow2", "longer.qcow2"].map(|name| fs::read(dir.join(name)).unwrap());
    let before = files();
    let said = fails(dir, 1, &["coalesce", "longer.qcow2"]);
    assert!(said.contains("old.qcow2") && said.contains("internal-snapshot --delete"), "{said}");
    assert!(files() == before, "a refused merge has changed an image");
}
