//! Jobs that do not come to their end: of disks that are detached, and what was broken off and is given up; what is refused before a job begins,
//! and the ways that such messages name.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::common::host::{bytes_of, names, raw, serve};
use crate::common::{eventually, fails, json, ok, spile};
use serde_json::Value;

/// The job of the disk `disk`, or null.
fn job_of(dir: &Path, disk: &str) -> Value {
    let jobs = json(dir, &["jobs"]);
    jobs["jobs"].as_array().unwrap().iter().find(|job| job["disk"] == disk).unwrap_or(&Value::Null).clone()
}

/// Of the images that `tree` shows, the one called `name`.
fn in_tree(dir: &Path, name: &str) -> Value {
    let tree = json(dir, &["tree", "."]);
    let is_it = |image: &&Value| image["path"].as_str().unwrap().ends_with(&format!("/{name}"));
    tree["images"].as_array().unwrap().iter().find(is_it).unwrap().clone()
}

#[test]
fn a_disk_with_a_job_is_detached_by_force_only_and_the_job_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "given-held.raw", 1);
    raw(dir, "given-other.raw", 2);
    let served = serve(dir, &["given-held.raw", "given-other.raw"]);
    let mut waiting = spile();
    waiting.args(["backup", "given-held", "slow.raw", "--rate", "64k", "--wait"]).current_dir(dir);
    let waiting = waiting.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the backup is at work", || job_of(dir, "given-held")["state"] == "running");
    let id = job_of(dir, "given-held")["id"].as_str().unwrap().to_owned();
    let refused = fails(dir, 1, &["detach", "given-held"]);
    assert!(refused.contains(&format!("has a job, {id}: a backup")) && refused.contains("--force"), "{refused}");
    assert_eq!(job_of(dir, "given-held")["state"], "running");
    let said = ok(dir, &["detach", "given-held", "--force"]);
    assert!(said.contains(&format!("the job {id}, a backup, was ended")), "{said}");
    let waited = waiting.wait_with_output().unwrap();
    let told = String::from_utf8(waited.stderr).unwrap();
    assert!(waited.status.code() == Some(1) && told.contains("disk was detached"), "{told}");
    let job = job_of(dir, "given-held");
    assert!(job["id"] == *id && job["state"] == "failed", "{job}");
    assert!(fails(dir, 2, &["job", &id, "pause"]).contains("is over"));
    assert_eq!(names(dir), ["given-held.raw", "given-other.raw"]);
    // What has ended is no reason to stay.
    ok(dir, &["backup", "given-other", "whole.raw", "--wait"]);
    let left = json(dir, &["detach", "given-other"]);
    assert!(
        left["ended_jobs"].as_array().unwrap().is_empty() && left["disks"].as_array().unwrap().is_empty(),
        "{left}"
    );
    assert_eq!(job_of(dir, "given-other")["state"], "done");
    assert!(served.terminate().success());
}

#[test]
fn a_copy_that_could_never_be_finished_is_not_begun() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "alone.vhd", "--size", "16M"]);
    let said = fails(dir, 1, &["move", "alone.vhd", "--to", "copy.vhd", "--mirror-only"]);
    assert!(said.contains("spile serve"), "{said}");
    assert_eq!(names(dir), ["alone.vhd"]);
}

#[test]
fn a_job_that_was_broken_off_is_given_up_without_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let bytes = raw(dir, "bytes.raw", 3);
    ok(dir, &["convert", "bytes.raw", "given-base.vhd"]);
    fs::remove_file(dir.join("bytes.raw")).unwrap();
    ok(dir, &["create", "given-up.vhd", "--parent", "given-base.vhd"]);
    let before = names(dir);
    let orders: [&[&str]; 3] = [
        &["move", "given-up", "--to", "copy.vhd", "--mirror-only"],
        &["move", "given-up", "--to", "new.vhd"],
        &["flatten", "given-up"],
    ];
    for order in orders {
        let served = serve(dir, &["given-up.vhd"]);
        ok(dir, &[order, &["--rate", "64k", "--background"]].concat());
        assert!(served.terminate().success());
        assert!(names(dir).contains(&".given-up.vhd.spile-job".to_owned()), "{order:?}: {:?}", names(dir));
        let refused = fails(dir, 1, &["snapshot", "given-up.vhd", "--name", "x.vhd"]);
        assert!(refused.contains("given-up.vhd cancel"), "{order:?}: {refused}");
        if order[0] == "move" {
            let found = json(dir, &["gc", ".", "--dry-run"])["found"][0].clone();
            assert!(found["reason"].as_str().unwrap().contains("given-up.vhd cancel"), "{found}");
            let refused = fails(dir, 1, &["coalesce", "given-up.vhd"]);
            assert!(refused.contains("given-up.vhd cancel"), "{refused}");
        }
        assert!(fails(dir, 1, &["job", "given-up.vhd", "pause"]).contains("spile job DISK cancel"));
        let job = json(dir, &["job", "given-up.vhd", "cancel"]);
        assert!(job["state"] == "cancelled" && job["kind"] == order[0], "{job}");
        assert_eq!(names(dir), before, "{order:?}");
        assert!(bytes_of(dir, "given-up.vhd") == bytes, "{order:?} has changed the disk");
    }
    assert!(fails(dir, 1, &["job", "given-up.vhd", "cancel"]).contains("no job was left"));
    ok(dir, &["snapshot", "given-up.vhd", "--name", "x.vhd"]);
    // A merge: what it has done stays done.
    let served = serve(dir, &["given-up.vhd"]);
    ok(dir, &["coalesce", "given-up", "--layer", "x", "--rate", "64k", "--background"]);
    assert!(served.terminate().success());
    if names(dir).contains(&".given-up.vhd.spile-job".to_owned()) {
        assert!(ok(dir, &["job", "given-up.vhd", "cancel"]).contains("the coalesce"));
    }
    assert!(bytes_of(dir, "given-up.vhd") == bytes && !names(dir).contains(&".given-up.vhd.spile-job".to_owned()));
}

#[test]
fn a_disk_that_was_handed_over_has_no_job_to_give_up() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "gone.raw", 1);
    ok(dir, &["move", "gone.raw", "--to", "there.raw"]);
    for disk in ["gone.raw", "there.raw"] {
        fails(dir, 1, &["job", disk, "cancel"]);
    }
    assert!(names(dir).contains(&"there.raw".to_owned()));
}

#[test]
fn a_cancel_has_ended_the_job_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "given-cancel.raw", 1);
    let _served = serve(dir, &["given-cancel.raw"]);
    for by in ["id", "disk"] {
        let begun = json(dir, &["backup", "given-cancel", "slow.raw", "--rate", "64k", "--background"]);
        let id = begun["jobs"][0]["id"].as_str().unwrap().to_owned();
        ok(dir, &["job", &id, "pause"]);
        let which = if by == "id" { &id } else { "given-cancel" };
        let job = json(dir, &["job", which, "cancel"]);
        assert!(job["state"] == "cancelled" && job["id"] == *id, "{job}");
    }
    // The disk may have the next one at once.
    ok(dir, &["backup", "given-cancel", "whole.raw", "--wait"]);
    assert!(fails(dir, 1, &["job", "given-cancel", "cancel"]).contains("no job that is under way"));
}

#[test]
fn a_leaf_whose_parent_cannot_take_its_name_is_neither_offered_nor_begun() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "golden.raw", 1);
    ok(dir, &["clone", "golden.raw", "given-leaf.vhd"]);
    assert_eq!(in_tree(dir, "given-leaf.vhd")["coalesce_frees_bytes"], Value::Null);
    let served = serve(dir, &["given-leaf.vhd"]);
    let refused = fails(dir, 1, &["coalesce", "given-leaf"]);
    assert!(refused.contains("cannot take the name"), "{refused}");
    assert_eq!(job_of(dir, "given-leaf"), Value::Null);
    assert!(served.terminate().success());
    // A layer in the middle needs no other name.
    ok(dir, &["snapshot", "given-leaf.vhd", "--name", "middle.vhd"]);
    assert!(in_tree(dir, "middle.vhd")["coalesce_frees_bytes"].is_u64());
    ok(dir, &["coalesce", "given-leaf.vhd", "--layer", "middle"]);
}

#[test]
fn a_raw_disk_that_has_no_snapshots_is_told_the_ways_that_work() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let bytes = raw(dir, "given-raw.raw", 5);
    let said = fails(dir, 1, &["snapshot", "given-raw.raw", "--name", "x.vhd"]);
    assert!(said.contains("spile convert") && said.contains("spile clone") && !said.contains("server"), "{said}");
    let served = serve(dir, &["given-raw.raw"]);
    let vhd = dir.canonicalize().unwrap().join("given-raw.vhd").display().to_string();
    let advice = format!("spile move given-raw --to {vhd} --wait");
    let refused: [&[&str]; 2] = [&["snapshot", "given-raw", "--name", "x.vhd"], &["clone", "given-raw", "child.vhd"]];
    for command in refused {
        let said = fails(dir, 1, command);
        assert!(said.contains(&advice) && !said.contains("spile clone"), "{command:?}: {said}");
    }
    let words: Vec<_> = advice.split(' ').skip(1).collect();
    ok(dir, &words);
    ok(dir, &["snapshot", "given-raw", "--name", "x.vhd"]);
    ok(dir, &["clone", "given-raw", "child.vhd"]);
    assert!(served.terminate().success());
    assert!(bytes_of(dir, "child.vhd") == bytes);
    // Where the format ends, neither of these helps.
    fs::File::create(dir.join("given-big.raw")).unwrap().set_len(3 << 40).unwrap();
    let _served = serve(dir, &["given-big.raw"]);
    let refused: [&[&str]; 2] = [&["snapshot", "given-big", "--name", "x.vhd"], &["clone", "given-big", "big.vhd"]];
    for command in refused {
        let said = fails(dir, 1, command);
        assert!(said.contains("2040 GiB") && !said.contains("spile move"), "{command:?}: {said}");
    }
    fs::File::create(dir.join("alone.raw")).unwrap().set_len(3 << 40).unwrap();
    assert!(fails(dir, 2, &["clone", "alone.raw", "big.vhd"]).contains("ends at 2040 GiB"));
}

#[test]
fn a_snapshot_is_found_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "given-named.vhd", "--size", "16M"]);
    for name in ["given-mon.vhd", "given-tue.vhd"] {
        ok(dir, &["snapshot", "given-named.vhd", "--name", name]);
    }
    fs::create_dir(dir.join("elsewhere")).unwrap();
    let elsewhere = dir.join("elsewhere");
    ok(&elsewhere, &["revert", "../given-named.vhd", "given-tue", "--discard"]);
    // The disk's own folder.
    assert!(ok(dir, &["delete", "given-tue"]).contains("given-tue.vhd"));
    assert!(ok(dir, &["delete", "given-tue", "--undo"]).contains("is kept"));
    // Elsewhere a server's disk leads to it.
    let served = serve(dir, &["given-named.vhd"]);
    assert!(ok(&elsewhere, &["delete", "given-mon"]).contains("given-mon.vhd"));
    assert!(ok(&elsewhere, &["delete", "given-mon", "--undo"]).contains("is kept"));
    assert!(served.terminate().success());
    fails(&elsewhere, 1, &["delete", "given-mon"]);
    fs::write(dir.join("given-mon.raw"), [0; 512]).unwrap();
    assert!(fails(dir, 2, &["delete", "given-mon"]).contains("several images are called"));
}

#[test]
fn a_disk_that_is_named_twice_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "twice.vhd", "--size", "16M"]);
    let whole = dir.join("twice.vhd").display().to_string();
    for other in ["twice.vhd", "./twice.vhd", &whole] {
        assert!(fails(dir, 2, &["snapshot", "twice.vhd", other, "--name", "x"]).contains("is named twice"), "{other}");
    }
    assert_eq!(names(dir), ["twice.vhd"]);
}

#[test]
fn a_resize_says_what_it_did_and_names_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "given-size.vhd", "--size", "16M"]);
    assert!(ok(dir, &["resize", "given-size.vhd", "32M"]).contains("has 32 MiB (33554432 bytes) now, and had 16 MiB"));
    assert!(ok(dir, &["resize", "given-size.vhd", "32M"]).contains("(33554432 bytes) already"));
    let served = serve(dir, &["given-size.vhd"]);
    let resized = json(dir, &["resize", "given-size", "48M"]);
    assert_eq!(
        (&resized["old_virtual_size_bytes"], &resized["virtual_size_bytes"]),
        (&(32 << 20).into(), &(48 << 20).into())
    );
    let refused = fails(dir, 1, &["resize", "given-size", "32M", "--shrink"]);
    assert!(refused.contains("\"given-size\" is served") && !refused.contains(".control"), "{refused}");
    assert!(served.terminate().success());
}

#[test]
fn a_move_names_the_place_that_the_user_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "from.raw", 1);
    let said = fails(dir, 1, &["move", "from.raw", "--to", "nbd://127.0.0.1:1/x.raw"]);
    assert!(said.contains("nbd://127.0.0.1:1/x.raw") && !said.contains(".spile-receive"), "{said}");
    let said = fails(dir, 1, &["move", "from.raw", "--to", "host2:/vm/x.raw"]);
    assert!(said.contains("nbds://host2/x.raw"), "{said}");
    // A colon in a name is nothing else.
    ok(dir, &["migrate", "from.raw", "--to", "a:b.raw"]);
    let tree = ok(dir, &["tree", "."]);
    assert!(
        tree.contains(".from.raw.spile-moved: says where the disk was moved to") && !tree.contains("of work on"),
        "{tree}"
    );
}

#[test]
fn an_age_below_a_second_is_said_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "aged.vhd", "--size", "16M"]);
    ok(dir, &["checkpoint", "aged.vhd", "now"]);
    assert!(!ok(dir, &["checkpoint", "aged.vhd", "--list"]).contains("0.00"));
}

#[test]
fn other_programs_names_of_the_verbs_are_known() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.vhd", "--size", "16M"]);
    ok(dir, &["create", "leaf.vhd", "--parent", "base.vhd"]);
    ok(dir, &["snapshot", "leaf.vhd", "--name", "x.vhd"]);
    assert!(ok(dir, &["commit", "leaf.vhd", "--layer", "x"]).contains("coalesce is done"));
    ok(dir, &["stream", "leaf.vhd"]);
    ok(dir, &["mirror", "leaf.vhd", "--to", "there.vhd"]);
    let help = ok(dir, &["--help"]);
    assert!(["commit", "stream", "mirror", "migrate"].iter().all(|name| help.contains(name)), "{help}");
}

#[test]
fn who_waits_without_a_terminal_sees_how_far_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(dir, "given-slow.raw", 1);
    let _served = serve(dir, &["given-slow.raw"]);
    // Longer than the time between two lines.
    let mut waiting = spile();
    waiting.args(["backup", "given-slow", "slow.raw", "--rate", "640k", "--wait"]).current_dir(dir);
    let told = String::from_utf8(waiting.output().unwrap().stderr).unwrap();
    assert!(told.contains("spile: copying: ") && told.contains(" of "), "{told}");
}
