//! `spile move --chain keep`: the parents go along, are found there by the next disk, and survive kills; what is refused.

use std::fs;
use std::path::Path;

use crate::common::chains::{MIB, chain, family, file};
use crate::common::guests::Load;
use crate::common::host::{bytes_of, serve};
use crate::common::moves::job;
use crate::common::nbd::Client;
use crate::common::{eventually, fails, json, ok};

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir.join("new")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.ends_with("-came") && !name.ends_with("-changes")).collect();
    names.sort();
    names
}

#[test]
fn a_disk_takes_its_parents_along_under_load_and_the_next_one_finds_them() {
    let (dir, bytes) = family("new", "chain-live.vhd", 10);
    let dir = dir.path();
    let served = serve(dir, &["old/chain-live.vhd", "--vhost-user", "v"]);
    let mut load = Load::start(dir, "v", &["--span", "48M"]);
    load.goes_on(&served);
    let moved = json(dir, &["move", "chain-live", "--to", "new", "--chain", "keep", "--wait"]);
    assert_eq!((&moved["state"], &moved["motion"]["parents_done"]), (&"done".into(), &2.into()), "{moved}");
    load.goes_on(&served);
    assert_eq!(load.end(), 0);
    assert!(served.terminate().success());
    assert_eq!(chain(dir, "new/chain-live.vhd"), ["chain-live.vhd", "mid.vhd", "base.raw"]);
    assert_eq!(names(dir), ["base.raw", "chain-live.vhd", "mid.vhd"]);
    ok(dir, &["check", "new/chain-live.vhd"]);
    // The old parents stay, for others; sparse stays sparse.
    let parents =
        ["base.raw", "mid.vhd"].map(|name| (file(dir, &format!("old/{name}")).1, file(dir, &format!("new/{name}")).1));
    assert!(parents.iter().all(|(old, new)| *new <= old + (1 << 20)), "{parents:?}");
    assert!(file(dir, "new/base.raw").1 < 16 << 20, "{parents:?}");

    let before = ["new/base.raw", "new/mid.vhd"].map(|path| file(dir, path));
    let moved = json(dir, &["move", "old/other.vhd", "--to", "new", "--chain", "keep"]);
    assert_eq!(moved["state"], "done", "{moved}");
    assert_eq!(["new/base.raw", "new/mid.vhd"].map(|path| file(dir, path)), before, "a parent was copied again");
    assert_eq!(chain(dir, "new/other.vhd"), ["other.vhd", "mid.vhd", "base.raw"]);
    assert!(file(dir, "new/other.vhd").1 < 1 << 20, "the new leaf holds what its parents have");
    assert!(bytes_of(dir, "new/other.vhd") == bytes, "the bytes are others");
}

#[test]
fn a_parent_half_copied_is_never_taken_for_a_whole_one() {
    let (dir, mut bytes) = family("new", "chain-killed.vhd", 10);
    let dir = dir.path();
    let hidden = dir.join("new/.there.vhd.spile-moving-parent");
    let served = serve(dir, &["old/chain-killed.vhd"]);
    json(dir, &["move", "chain-killed", "--to", "new/there.vhd", "--chain", "keep", "--rate", "2M", "--background"]);
    eventually("some of a parent is copied", || job(dir, "chain-killed")["done_bytes"].as_u64().unwrap() > 1 << 20);
    assert_eq!(job(dir, "chain-killed")["motion"]["phase"], "copying parents");
    assert!(hidden.exists() && !dir.join("new/base.raw").exists());
    // What a guest writes meanwhile: data, zeroes over a parent's data, and data that is discarded.
    let client = Client::connect(&served.uri()).unwrap();
    client.write(4096, &[9; 8192], false).unwrap();
    bytes[4096..4096 + 8192].fill(9);
    client.write(16 << 20, &vec![0; MIB], true).unwrap();
    bytes[16 * MIB..17 * MIB].fill(0);
    drop(client);
    served.kill();
    assert!(hidden.exists() && !dir.join("new/base.raw").exists());
    let served = serve(dir, &["old/chain-killed.vhd"]);
    eventually("it goes on", || job(dir, "chain-killed")["state"] == "running");
    ok(dir, &["job", job(dir, "chain-killed")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "chain-killed")["state"] == "done");
    assert!(served.terminate().success());
    assert_eq!(chain(dir, "new/there.vhd"), ["there.vhd", "mid.vhd", "base.raw"]);
    assert_eq!(names(dir), ["base.raw", "mid.vhd", "there.vhd"]);
    assert!(bytes_of(dir, "new/there.vhd") == bytes, "what was acknowledged is lost");

    // One that is cancelled leaves whole parents only.
    let served = serve(dir, &["old/other.vhd,name=chain-cancelled"]);
    fs::create_dir(dir.join("third")).unwrap();
    let to = "third/other.vhd";
    let begun = json(dir, &["move", "chain-cancelled", "--to", to, "--chain", "keep", "--rate", "2M", "--background"]);
    eventually("some is copied", || job(dir, "chain-cancelled")["done_bytes"].as_u64().unwrap() > 1 << 20);
    ok(dir, &["job", begun["id"].as_str().unwrap(), "cancel"]);
    eventually("it is cancelled", || job(dir, "chain-cancelled")["state"] == "cancelled");
    assert_eq!(fs::read_dir(dir.join("third")).unwrap().count(), 0);
    assert!(served.terminate().success());
}

#[test]
fn a_chain_that_cannot_be_kept_is_refused_and_nothing_changes() {
    let (dir, bytes) = family("new", "chain-refused.vhd", 10);
    let dir = dir.path();
    let refused = |to: &str, says: &str| {
        let said = fails(dir, 1, &["move", "old/chain-refused.vhd", "--to", to, "--chain", "keep"]);
        assert!(said.contains(says), "{to}: {said}");
    };
    refused("new/x.raw", "a raw has no parent");
    refused("nbd://localhost/x.raw", "a raw has no parent");
    refused("new/mid.vhd", "two of its images would be");
    // Other images have the parents' names: of another kind, of another UUID, of another size, and with other bytes.
    fs::write(dir.join("new/mid.vhd"), vec![7; MIB]).unwrap();
    refused("new", "another file has it");
    fs::remove_file(dir.join("new/mid.vhd")).unwrap();
    ok(dir, &["create", "new/mid.vhd", "--size", "64M"]);
    refused("new", "its UUID is another");
    fs::remove_file(dir.join("new/mid.vhd")).unwrap();
    fs::write(dir.join("new/base.raw"), vec![7; MIB]).unwrap();
    refused("new", "it has 1048576 bytes, and not 67108864");
    fs::copy(dir.join("old/base.raw"), dir.join("new/base.raw")).unwrap();
    let written = fs::File::options().write(true).open(dir.join("new/base.raw")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&written, &[1], 40 << 20).unwrap();
    refused("new", "what it shows differs");
    assert_eq!(names(dir), ["base.raw"]);
    assert!(bytes_of(dir, "old/chain-refused.vhd") == bytes, "the disk has changed");
    // With the same bytes it is the parent.
    std::os::unix::fs::FileExt::write_all_at(&written, &[15], 40 << 20).unwrap();
    drop(written);
    let before = file(dir, "new/base.raw").0;
    ok(dir, &["move", "old/chain-refused.vhd", "--to", "new", "--chain", "keep"]);
    assert_eq!(file(dir, "new/base.raw").0, before);
    assert!(bytes_of(dir, "new/chain-refused.vhd") == bytes, "the bytes are others");
}
