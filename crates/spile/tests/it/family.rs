//! Parents and children: what is refused before it does harm.

use std::fs;
use std::path::Path;

use crate::common::guests::rest_of_stderr;
use crate::common::{Served, fails, json, ok};

#[test]
fn a_child_is_not_made_where_no_command_would_find_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir_all(dir.join("base")).unwrap();
    fs::create_dir_all(dir.join("leaf")).unwrap();
    ok(dir, &["create", "base/p.vhd", "--size", "1M"]);
    let err = fails(dir, 1, &["create", "leaf/c.vhd", "--parent", "base/p.vhd"]);
    assert!(err.contains("outside the folder") && err.contains("--allow-parents"), "{err}");
    assert!(!dir.join("leaf/c.vhd").exists());
    ok(dir, &["create", "leaf/c.vhd", "--parent", "base/p.vhd", "--allow-parents", "base"]);
    ok(dir, &["create", "top.vhd", "--parent", "base/p.vhd"]);
    ok(dir, &["info", "--chain", "top.vhd"]);
    // A grandchild needs all of the chain.
    fails(dir, 1, &["create", "leaf/d.vhd", "--parent", "leaf/c.vhd"]);
    ok(dir, &["create", "leaf/d.vhd", "--parent", "leaf/c.vhd", "--allow-parents", "base"]);
}

/// Serves these and ends in order, so that no file is locked any more; or what was said against it.
fn opens(dir: &Path, args: &[&str]) -> Result<(), String> {
    Served::try_start(dir, &[args, &["--control", "none"]].concat()).map(|served| assert!(served.terminate().success()))
}

#[test]
fn a_parent_is_not_served_for_writing_unless_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("other")).unwrap();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    ok(dir, &["create", "base.raw", "--size", "1M"]);
    opens(dir, &["p.vhd"]).unwrap();
    opens(dir, &["base.raw"]).unwrap();
    ok(dir, &["create", "c.avhd", "--parent", "p.vhd"]);
    ok(dir, &["create", "d.vhd", "--parent", "base.raw"]);
    for (parent, child) in [("p.vhd", "c.avhd"), ("base.raw", "d.vhd")] {
        let err = opens(dir, &[parent]).unwrap_err();
        assert!(err.contains(child) && err.contains("--write-parent"), "{err}");
        opens(dir, &[child]).unwrap();
        opens(dir, &[&format!("{parent},read-only")]).unwrap();
        opens(dir, &[parent, "--write-parent"]).unwrap();
    }
    // A parent of another identity, or at another place, is none of this child's.
    fs::rename(dir.join("p.vhd"), dir.join("other/p.vhd")).unwrap();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    opens(dir, &["p.vhd"]).unwrap();
    opens(dir, &["other/p.vhd"]).unwrap();
}

/// A snapshot takes the file along, and the link still leads to it.
#[test]
fn a_parent_is_not_written_by_another_name_of_its_file() {
    for ext in ["vhd", "qcow2"] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let [disk, link] = ["disk", "link"].map(|name| format!("{name}.{ext}"));
        ok(dir, &["create", &disk, "--size", "1M"]);
        fs::hard_link(dir.join(&disk), dir.join(&link)).unwrap();
        opens(dir, &[&link]).unwrap();
        ok(dir, &["snapshot", &disk, "--name", "s"]);
        let err = opens(dir, &[&link]).unwrap_err();
        assert!(err.contains("it is the same file as") && err.contains(&format!("{disk} is a child")), "{err}");
        opens(dir, &[&disk]).unwrap();
        opens(dir, &[&format!("{link},read-only")]).unwrap();
        ok(dir, &["delete", &disk]);
        opens(dir, &[&link]).unwrap();
    }
}

#[test]
fn a_parent_that_was_moved_is_named_with_all_that_was_tried_and_what_helps() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &dir.path().canonicalize().unwrap();
    fs::create_dir_all(dir.join("vm")).unwrap();
    fs::create_dir_all(dir.join("base")).unwrap();
    ok(dir, &["create", "vm/p.vhd", "--size", "1M"]);
    ok(dir, &["create", "vm/c.vhd", "--parent", "vm/p.vhd"]);
    fs::rename(dir.join("vm/p.vhd"), dir.join("base/p.vhd")).unwrap();
    let tried = format!("tried: {:?} (", dir.join("vm/p.vhd"));
    // Allowing the folder is not enough, and the message does not say so.
    for allowed in [&[][..], &["--allow-parents", "base"]] {
        let said = fails(dir, 1, &[&["info", "--chain", "vm/c.vhd"], allowed].concat());
        assert!(said.contains(&tried) && said.contains("put it there again, or a link to it"), "{said}");
    }
    // With a link there, the folder is what is missing.
    std::os::unix::fs::symlink(dir.join("base/p.vhd"), dir.join("vm/p.vhd")).unwrap();
    let said = fails(dir, 1, &["info", "--chain", "vm/c.vhd"]);
    let helps = format!("allow that folder with --allow-parents {}", dir.join("base").display());
    assert!(said.contains("base/p.vhd lies outside the folders") && said.contains(&helps), "{said}");
    ok(dir, &["info", "--chain", "vm/c.vhd", "--allow-parents", "base"]);
}

/// Sets the time at which a file was last written to two hours from now.
fn write_later(file: &Path) {
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(7200);
    fs::File::options().write(true).open(file).unwrap().set_modified(later).unwrap();
}

#[test]
fn a_parent_that_was_written_after_its_child_was_made_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    if let Err(why) = fs::metadata(dir).unwrap().created() {
        return println!("SKIP a_parent_that_was_written_after_its_child_was_made_is_told: {why}");
    }
    ok(dir, &["create", "base.raw", "--size", "1M"]);
    ok(dir, &["create", "p.vhd", "--parent", "base.raw"]);
    ok(dir, &["create", "c.vhd", "--parent", "p.vhd"]);
    let notes = || -> Vec<String> {
        let told = json(dir, &["check", "c.vhd"]);
        assert_eq!(told["result"], "sound");
        let findings = told["findings"].as_array().unwrap().iter();
        findings.map(|finding| finding["message"].as_str().unwrap().to_owned()).collect()
    };
    let logs = || {
        let mut served = Served::start(dir, &["c.vhd", "--control", "none"]);
        served.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(served.wait().success());
        rest_of_stderr(&mut served)
    };
    let in_doubt = |text: &str| text.contains("what the child shows may be wrong");
    assert!(notes().is_empty() && !in_doubt(&logs()), "{:?}", notes());
    // One of Spile's making may have been made durable.
    write_later(&dir.join("p.vhd"));
    assert!(
        notes()[0].contains("p.vhd was written 7") && notes()[0].contains("its writer was killed"),
        "{:?}",
        notes()
    );
    assert!(!in_doubt(&logs()));
    write_later(&dir.join("base.raw"));
    assert!(notes()[1].contains("base.raw was written 7"), "{:?}", notes());
    let logged = logs();
    assert!(in_doubt(&logged) && logged.matches("may be wrong").count() == 1, "{logged}");
}

#[test]
fn the_parents_of_qcow2_images_are_found_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "base.raw", "--size", "1M"]);
    // A header of version 2 with a backing file, as in its specification.
    let mut header = vec![0; 1 << 16];
    let name = b"base.raw";
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    header[8..16].copy_from_slice(&1024u64.to_be_bytes());
    header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    header[20..24].copy_from_slice(&16u32.to_be_bytes());
    header[24..32].copy_from_slice(&(1u64 << 20).to_be_bytes());
    header[36..40].copy_from_slice(&1u32.to_be_bytes());
    header[40..48].copy_from_slice(&(3u64 << 16).to_be_bytes());
    header[48..56].copy_from_slice(&(1u64 << 16).to_be_bytes());
    header[56..60].copy_from_slice(&1u32.to_be_bytes());
    header[1024..1024 + name.len()].copy_from_slice(name);
    fs::write(dir.join("child.qcow2"), [header, vec![0; 3 << 16]].concat()).unwrap();
    let err = opens(dir, &["base.raw"]).unwrap_err();
    assert!(err.contains("child.qcow2"), "{err}");
}

#[test]
fn what_cannot_be_read_is_nobodys_child() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "1M"]);
    fs::write(dir.join("broken.vhd"), vec![7; 4096]).unwrap();
    fs::write(dir.join("empty.qcow2"), "").unwrap();
    fs::create_dir(dir.join("folder.vhd")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.join("dangling.vhd")).unwrap();
    std::process::Command::new("mkfifo").arg(dir.join("pipe.vhd")).status().unwrap();
    opens(dir, &["p.vhd"]).unwrap();
}
