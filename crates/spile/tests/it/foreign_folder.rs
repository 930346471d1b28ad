//! A folder that somebody else may change at any moment: names that become links or other files while a command works.

use std::os::unix::fs::{MetadataExt as _, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::common::nbd::Client;
use crate::common::{Served, fails, ok, run};

/// A user that is neither root nor the one of this test.
const TENANT: u32 = 54321;
/// So often each race is run.
const ROUNDS: usize = 12;
const SECRET: &[u8] = b"TOP SECRET OF ROOT";

/// Does something again and again, beside a command, until it is dropped.
struct Beside {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Beside {
    fn again(act: impl Fn() + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let end = ends.clone();
        let work = move || {
            while !end.load(Ordering::Relaxed) {
                act();
            }
        };
        Self { ends, thread: Some(std::thread::spawn(work)) }
    }

    /// Exchanges two names.
    fn exchanging(dir: &Path, a: &str, b: &str) -> Self {
        let [a, b] = [a, b].map(|name| dir.join(name));
        Self::again(move || _ = renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A file that only root may read, and a link of a tenant that leads to it.
struct Trap {
    dir: tempfile::TempDir,
    victim: PathBuf,
}

impl Trap {
    /// `None` where there is nothing to be shown.
    fn new(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIP {test}: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("root/victim.raw");
        std::fs::create_dir_all(victim.parent().unwrap()).unwrap();
        std::fs::create_dir(dir.path().join("ten")).unwrap();
        std::fs::write(&victim, SECRET.repeat(4096)).unwrap();
        let trap = Self { dir, victim };
        lchown(trap.ten(), Some(TENANT), Some(TENANT)).unwrap();
        Some(trap)
    }

    fn ten(&self) -> PathBuf {
        self.dir.path().join("ten")
    }

    fn link(&self, name: &str) {
        symlink(&self.victim, self.ten().join(name)).unwrap();
        lchown(self.ten().join(name), Some(TENANT), Some(TENANT)).unwrap();
    }

    fn assert_untouched(&self) {
        let stat = std::fs::metadata(&self.victim).unwrap();
        assert_eq!(stat.uid(), 0, "it was given away");
        assert!(std::fs::read(&self.victim).unwrap() == SECRET.repeat(4096), "it was written to");
    }
}

fn holds_secret(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(SECRET.len()).any(|part| part == SECRET))
}

#[test]
fn a_parent_that_becomes_a_link_shows_nothing_of_root() {
    let Some(trap) = Trap::new("a_parent_that_becomes_a_link") else { return };
    let ten = trap.ten();
    std::fs::write(ten.join("x.raw"), vec![7; SECRET.len() * 4096]).unwrap();
    ok(&ten, &["create", "d.vhd", "--parent", "x.raw"]);
    trap.link("l");
    let exchanging = Beside::exchanging(&ten, "l", "x.raw");
    for round in 0..ROUNDS {
        let copy = trap.dir.path().join(format!("copy{round}.raw"));
        run(&ten, &["convert", "d.vhd", copy.to_str().unwrap()]);
        assert!(!holds_secret(&copy), "round {round}");
    }
    drop(exchanging);
    trap.assert_untouched();
}

#[test]
fn a_disk_that_becomes_a_link_shows_nothing_of_root() {
    let Some(trap) = Trap::new("a_disk_that_becomes_a_link") else { return };
    let ten = trap.ten();
    std::fs::write(ten.join("d.raw"), vec![7; 65536]).unwrap();
    trap.link("l.raw");
    let told = fails(&ten, 1, &["convert", "l.raw", "copy.raw"]);
    assert!(told.contains("symbolic link of user 54321"), "{told}");
    let exchanging = Beside::exchanging(&ten, "l.raw", "d.raw");
    for round in 0..ROUNDS {
        let copy = trap.dir.path().join(format!("copy{round}.raw"));
        run(&ten, &["convert", "d.raw", copy.to_str().unwrap()]);
        run(&ten, &["resize", "d.raw", &format!("{}K", 128 + round)]);
        assert!(!holds_secret(&copy), "round {round}");
    }
    drop(exchanging);
    trap.assert_untouched();
}

#[test]
fn a_data_file_that_becomes_a_link_is_not_written() {
    let Some(trap) = Trap::new("a_data_file_that_becomes_a_link") else { return };
    let ten = trap.ten();
    ok(&ten, &["create", "d.qcow2", "--size", "64K", "--data-file", "x.raw"]);
    trap.link("l");
    let exchanging = Beside::exchanging(&ten, "l", "x.raw");
    for round in 0..ROUNDS {
        let copy = trap.dir.path().join(format!("copy{round}.raw"));
        run(&ten, &["convert", "d.qcow2", copy.to_str().unwrap(), "--allow-data-file"]);
        assert!(!holds_secret(&copy), "round {round}");
    }
    drop(exchanging);
    trap.assert_untouched();
}

#[test]
fn a_new_leaf_that_becomes_a_link_gives_nobody_roots_file() {
    let Some(trap) = Trap::new("a_new_leaf_that_becomes_a_link") else { return };
    let ten = trap.ten();
    for round in 0..ROUNDS {
        ok(&ten, &["create", "d.qcow2", "--size", "4M"]);
        lchown(ten.join("d.qcow2"), Some(TENANT), Some(TENANT)).unwrap();
        let (leaf, victim, swap) = (ten.join(".d.qcow2.spile-new"), trap.victim.clone(), ten.join("swap"));
        let planting = Beside::again(move || {
            if leaf.exists() && symlink(&victim, &swap).is_ok() {
                let _ = lchown(&swap, Some(TENANT), Some(TENANT));
                let _ = std::fs::rename(&swap, &leaf);
            }
        });
        run(&ten, &["snapshot", "d.qcow2", "--name", &format!("s{round}")]);
        drop(planting);
        trap.assert_untouched();
        for entry in std::fs::read_dir(&ten).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

/// How many files of the folder are the one that is not the disk's.
fn foreign_files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    entries.filter(|entry| std::fs::read(entry.path()).is_ok_and(|bytes| bytes.starts_with(b"FOREIGN"))).count()
}

/// While somebody exchanges the disk and another file, no verb takes the other file its last name.
#[test]
fn a_file_that_is_exchanged_with_the_disk_is_never_replaced() {
    let verbs: [&[&str]; 6] = [
        &["snapshot", "d.vhd", "--name", "new"],
        &["coalesce", "d.vhd"],
        &["flatten", "d.vhd"],
        &["revert", "d.vhd", "s0"],
        &["resize", "d.vhd", "16M"],
        &["check", "d.vhd", "--repair"],
    ];
    for verb in verbs {
        for _ in 0..ROUNDS / 4 {
            let dir = tempfile::tempdir().unwrap();
            ok(dir.path(), &["create", "d.vhd", "--size", "8M"]);
            ok(dir.path(), &["snapshot", "d.vhd", "--name", "s0"]);
            std::fs::write(dir.path().join("other"), "FOREIGN").unwrap();
            let exchanging = Beside::exchanging(dir.path(), "d.vhd", "other");
            run(dir.path(), verb);
            drop(exchanging);
            assert_eq!(foreign_files(dir.path()), 1, "{verb:?}");
        }
    }
}

#[test]
fn a_merge_does_not_replace_what_took_the_disks_path() {
    for format in ["vhd", "qcow2"] {
        let dir = tempfile::tempdir().unwrap();
        let disk = format!("d.{format}");
        ok(dir.path(), &["create", &disk, "--size", "8M"]);
        ok(dir.path(), &["snapshot", &disk, "--name", "s0"]);
        let served = Served::start(dir.path(), &[&disk]);
        Client::connect(&served.uri()).unwrap().write(0, &[1; 4096], true).unwrap();
        let path = dir.path().join(&disk);
        std::fs::rename(&path, dir.path().join("away")).unwrap();
        std::fs::write(&path, "FOREIGN").unwrap();
        let output = run(dir.path(), &["coalesce", "d", "--wait"]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{told}");
        assert!(told.contains(&disk) && told.contains(&format!("s0.{format}")), "both are named: {told}");
        assert_eq!(std::fs::read(&path).unwrap(), b"FOREIGN");
        // The disk goes on, and the merge works once its file is back.
        std::fs::rename(dir.path().join("away"), &path).unwrap();
        ok(dir.path(), &["coalesce", "d", "--wait"]);
        assert!(served.terminate().success());
        ok(dir.path(), &["check", &disk]);
    }
}

/// The same when the folder was renamed, and another one put in its place.
#[test]
fn a_merge_does_not_go_on_in_another_folder() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("vm");
    std::fs::create_dir(&at).unwrap();
    ok(&at, &["create", "d.vhd", "--size", "8M"]);
    ok(&at, &["snapshot", "d.vhd", "--name", "s0"]);
    let served = Served::start(dir.path(), &["vm/d.vhd"]);
    std::fs::rename(&at, dir.path().join("moved")).unwrap();
    std::fs::create_dir(&at).unwrap();
    for name in ["d.vhd", "s0.vhd"] {
        std::fs::write(at.join(name), "FOREIGN").unwrap();
    }
    let output = run(dir.path(), &["coalesce", "d", "--wait"]);
    assert!(!output.status.success());
    assert_eq!(foreign_files(&at), 2);
    assert!(served.terminate().success());
}

/// While a name of a verb is now the tenant's file and now a link to root's, nothing of root's file is shown, changed or given away, whatever the verb says.
#[test]
fn no_verb_follows_a_name_that_becomes_a_link() {
    let Some(trap) = Trap::new("no_verb_follows_a_name_that_becomes_a_link") else { return };
    let races: [(&[&str], &str); 16] = [
        (&["backup", "d.vhd", "b.raw"], "d.vhd"),
        (&["backup", "d.vhd", "b.raw"], "b.raw"),
        (&["verify", "kept.raw"], "kept.raw"),
        (&["restore", "kept.raw", "r.vhd"], "kept.raw"),
        (&["restore", "kept.raw", "r.vhd"], "r.vhd"),
        (&["move", "d.vhd", "--to", "m.vhd"], "d.vhd"),
        (&["move", "d.vhd", "--to", "m.vhd"], "m.vhd"),
        (&["checkpoint", "d.vhd", "c1"], "d.vhd"),
        (&["delete", "d.vhd"], "d.vhd"),
        (&["clone", "d.vhd", "c.vhd"], "c.vhd"),
        (&["flatten", "d.vhd"], "d.vhd"),
        (&["coalesce", "d.vhd"], "d-s0.vhd"),
        (&["revert", "d.vhd", "s0"], "d-s0.vhd"),
        (&["rebase", "d.vhd", "--parent", "d-s0.vhd"], "d-s0.vhd"),
        (&["convert", "d.vhd", "c.qcow2"], "c.qcow2"),
        (&["gc", "."], "d.vhd"),
    ];
    for (verb, name) in races {
        for round in 0..ROUNDS / 4 {
            let ten = trap.ten();
            ok(&ten, &["create", "d.vhd", "--size", "4M"]);
            ok(&ten, &["snapshot", "d.vhd", "--name", "s0"]);
            ok(&ten, &["backup", "d.vhd", "kept.raw"]);
            trap.link("l");
            let exchanging = Beside::exchanging(&ten, "l", name);
            run(&ten, verb);
            drop(exchanging);
            trap.assert_untouched();
            for entry in std::fs::read_dir(&ten).unwrap().flatten() {
                let is_link = entry.file_type().unwrap().is_symlink();
                assert!(is_link || !holds_secret(&entry.path()), "{verb:?}, round {round}: {:?}", entry.path());
                match entry.file_type().unwrap().is_dir() {
                    true => std::fs::remove_dir_all(entry.path()).unwrap(),
                    false => std::fs::remove_file(entry.path()).unwrap(),
                }
            }
        }
    }
}

#[test]
fn a_disk_in_use_stays_the_file_that_was_opened_whatever_its_name_leads_to() {
    let Some(trap) = Trap::new("a_disk_in_use_stays_the_file_that_was_opened") else { return };
    let ten = trap.ten();
    ok(&ten, &["create", "held.vhd", "--size", "64M"]);
    trap.link("l");
    let served = Served::start(&ten, &["held.vhd"]);
    let client = Client::connect(&served.uri()).unwrap();
    let exchanging = Beside::exchanging(&ten, "l", "held.vhd");
    for round in 0..ROUNDS / 4 {
        // Each takes a new block: the file grows.
        client.write((round as u64) << 21, &[1; 4096], true).unwrap();
        let (copy, name) = (format!("b{round}.raw"), format!("s{round}"));
        let verbs: [&[&str]; 5] = [
            &["backup", "held", &copy],
            &["snapshot", "held", "--name", &name],
            &["resize", "held", "+1M"],
            &["checkpoint", "held", &name],
            &["coalesce", "held"],
        ];
        for verb in verbs {
            run(&ten, verb);
        }
        assert!(!holds_secret(&ten.join(&copy)), "round {round}");
    }
    drop(exchanging);
    for round in 0..ROUNDS / 4 {
        let mut bytes = [0; 4096];
        client.read((round as u64) << 21, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 4096], "round {round}");
    }
    served.terminate();
    trap.assert_untouched();
}

#[test]
fn a_link_to_what_a_process_has_open_is_not_followed() {
    let Some(trap) = Trap::new("a_link_to_what_a_process_has_open") else { return };
    let (ten, held) = (trap.ten(), std::fs::File::open(&trap.victim).unwrap());
    let open = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&held));
    symlink(open, ten.join("p.raw")).unwrap();
    lchown(ten.join("p.raw"), Some(TENANT), Some(TENANT)).unwrap();
    let told = fails(&ten, 1, &["convert", "p.raw", "copy.raw"]);
    assert!(told.contains("symbolic link of user 54321") && !ten.join("copy.raw").exists(), "{told}");
    fails(&ten, 1, &["serve", "p.raw", "--nbd", "unix:s", "--control", "none"]);
    fails(&ten, 1, &["resize", "p.raw", "1G"]);
    trap.assert_untouched();
}

/// The note of a move decides about other files, so only Spile's own counts, and only for the disk that it was written for.
#[test]
fn a_planted_note_of_a_move_moves_nothing() {
    let Some(trap) = Trap::new("a_planted_note_of_a_move") else { return };
    let ten = trap.ten();
    let half = ten.join("h");
    let note = |image: &Path| {
        let (to, image, half) = (ten.join("none"), image.display(), half.display());
        format!("spile moved 1\nto {}\nimage {image}\nhalf {half}\nend\n", to.display())
    };
    let planted = ten.join(".d.raw.spile-moved");
    // The tenant's own note; and one that root's Spile has written for another disk, under a new name.
    for owner in [TENANT, 0] {
        std::fs::write(&half, "half").unwrap();
        std::fs::write(&planted, note(&trap.victim)).unwrap();
        lchown(&planted, Some(owner), Some(owner)).unwrap();
        let commands: [&[&str]; 3] = [
            &["serve", "d.raw", "--nbd", "unix:s", "--control", "none"],
            &["resize", "d.raw", "1G"],
            &["snapshot", "d.raw", "--name", "s"],
        ];
        for command in commands {
            fails(&ten, 1, command);
        }
        assert!(half.exists() && !ten.join("d.raw").exists(), "owner {owner}");
        trap.assert_untouched();
    }
}
