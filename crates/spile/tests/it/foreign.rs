//! Folders that somebody else may write in: names that steer a terminal, files with names of ours that are not ours, run folders and
//! sockets of others, orders that leave something behind.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::moves::receive;
use crate::common::nbd::Client;
use crate::common::{Served, fails, json, ok, run, spile};
use nix::unistd::geteuid;

/// Nobody of this host.
const OTHER: u32 = 4242;

/// A name that clears a screen, begins a line of its own, and is shown in another order than it is written.
const HOSTILE: &str = "e\u{1b}]0;x\u{7}\nsound\u{202e}\u{2066}\u{9b}.vhd";

fn text_of(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn assert_tame(args: &[&str], text: &str) {
    let is_wild = |c: char| c.is_control() && c != '\n' || "\u{202e}\u{2066}".contains(c);
    assert!(!text.chars().any(is_wild), "{args:?}: {text:?}");
    assert!(!text.lines().any(|line| line.starts_with("sound")), "{args:?}: a name makes a line: {text:?}");
}

/// A disk with a name that no command gives, but a stranger may.
fn make_hostile(dir: &Path) {
    ok(dir, &["create", "tame.vhd", "--size", "1M"]);
    fs::rename(dir.join("tame.vhd"), dir.join(HOSTILE)).unwrap();
}

#[test]
fn no_command_prints_a_name_that_steers_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let other = format!("2{HOSTILE}");
    let refused = ["create", HOSTILE, "--size", "1M"];
    assert_tame(&refused, &fails(dir, 2, &refused));
    make_hostile(dir);
    let commands: [&[&str]; 19] = [
        &["info", HOSTILE],
        &["check", HOSTILE],
        &["map", HOSTILE],
        &["tree", "."],
        &["measure", HOSTILE, "--to", "vhd"],
        &["resize", HOSTILE, "2M"],
        &["checkpoint", HOSTILE, "c1"],
        &["checkpoint", HOSTILE],
        &["snapshot", HOSTILE, "--name", "s1"],
        &["coalesce", HOSTILE],
        &["backup", HOSTILE, &other],
        &["verify", &other],
        &["verify", &format!("{other}\u{202e}")],
        &["restore", &other, &format!("3{HOSTILE}")],
        &["convert", HOSTILE, &format!("4{HOSTILE}")],
        &["compare", HOSTILE, &format!("4{HOSTILE}")],
        &["compare", HOSTILE, HOSTILE, HOSTILE],
        &["gc", "."],
        &["move", HOSTILE, "--to", &format!("5{HOSTILE}")],
    ];
    for args in commands {
        assert_tame(args, &text_of(&run(dir, args)));
    }
}

#[test]
fn no_command_prints_the_name_of_a_served_disk_that_steers_a_terminal_and_json_stays_exact() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    make_hostile(dir);
    let served = Served::start(dir, &[HOSTILE, "--control", "c"]);
    let commands: [&[&str]; 6] = [
        &["ls", "c"],
        &["show", "c"],
        &["stat", "c", "--interval", "50ms"],
        &["stat", "c", "--interval", "50ms", "--layers"],
        &["events", "c"],
        &["jobs"],
    ];
    for args in commands {
        assert_tame(args, &text_of(&run(dir, args)));
    }
    let text = ok(dir, &["ls", "c", "--json"]);
    assert!(!text.contains('\u{202e}') && !text.contains('\u{9b}'), "{text:?}");
    let list: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(list["disks"][0]["path"].as_str().unwrap().ends_with(HOSTILE), "{list}");
    assert!(served.terminate().success());
}

fn given_to_other(path: &Path) {
    chown(path, Some(OTHER), None).unwrap();
}

#[test]
fn notes_that_are_not_spiles_are_passed_over_and_named() {
    if !geteuid().is_root() {
        return println!("SKIP notes of others: only root can give a file to another user");
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "p.vhd", "--size", "4M"]);
    ok(dir, &["create", "d.vhd", "--parent", "p.vhd"]);
    let job = dir.join(".d.vhd.spile-job");
    let note = "spile job 1\nmove\nto /etc/spile.vhd\nformat vhd\ndelete yes\nstay no\nunmarked yes\nend\n";
    fs::write(&job, note).unwrap();
    given_to_other(&job);
    let changes = dir.join(".d.vhd.spile-changes");
    Command::new("mkfifo").arg(&changes).status().unwrap();
    let moved = dir.join(".d.vhd.spile-received");
    std::os::unix::fs::symlink("/etc/passwd", &moved).unwrap();
    let served = Served::start(dir, &["d.vhd", "--control", "c"]);
    let wants_job = run(dir, &["flatten", "c"]);
    assert!(text_of(&wants_job).contains(".d.vhd.spile-job"), "{}", text_of(&wants_job));
    let wants_changes = fails(dir, 1, &["checkpoint", "c", "c1"]);
    assert!(wants_changes.contains(".d.vhd.spile-changes"), "{wants_changes}");
    ok(dir, &["backup", "c", "b.vhd"]);
    let (code, said) = served.terminate_and_hear();
    assert!(code.success() && said.contains(".d.vhd.spile-job") && said.contains("4242"), "{said}");
    let snapshot = text_of(&run(dir, &["snapshot", "d.vhd", "--name", "s1"]));
    assert!(snapshot.contains("s1.vhd: what the disk held") && snapshot.contains("pipe"), "{snapshot}");
    let gone = dir.join(".p.vhd.spile-gone");
    fs::write(&gone, "anything").unwrap();
    given_to_other(&gone);
    let left = text_of(&run(dir, &["gc", "."]));
    assert!(left.contains("nothing to do") && left.contains(".p.vhd.spile-gone: Spile has not made this"), "{left}");
    assert!(gone.exists(), "what is not Spile's stays");
    assert_eq!(fs::read_to_string(&job).unwrap(), note, "what is not Spile's stays");
    assert!(changes.symlink_metadata().is_ok() && moved.symlink_metadata().unwrap().is_symlink());
}

fn mode_of(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_run_folder_is_everybodys_to_read_and_nobody_elses_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("u.raw"), [0; 4096]).unwrap();
    let serve = |folder: &str, umask: &str| {
        let program = spile().get_program().to_owned();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("umask {umask}; exec \"$0\" serve u.raw --nbd unix:n")]).arg(program);
        command.env("SPILE_RUN_DIR", dir.join(folder)).current_dir(dir);
        Served::spawn(&mut command, dir.join("n")).unwrap()
    };
    for (folder, umask) in [("a/run", "000"), ("b", "077")] {
        let served = serve(folder, umask);
        assert_eq!(mode_of(&dir.join(folder)), 0o755, "umask {umask}");
        assert_eq!(mode_of(&dir.join(folder).join("u.control")) & 0o077, 0, "umask {umask}");
        assert!(served.terminate().success());
    }
    for folder in ["a/run", "b"] {
        fs::set_permissions(dir.join(folder), fs::Permissions::from_mode(0o777)).unwrap();
        let (code, said) = serve(folder, "022").terminate_and_hear();
        assert!(code.success() && said.contains("others may write in this folder"), "{said}");
        assert!(!dir.join(folder).join("u.control").exists());
    }
}

#[test]
fn the_socket_of_another_user_is_not_believed() {
    if !geteuid().is_root() {
        return println!("SKIP sockets of others: only root can give a socket to another user");
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let listener = UnixListener::bind(dir.join("evil.control")).unwrap();
    given_to_other(&dir.join("evil.control"));
    listener.set_nonblocking(true).unwrap();
    let ls = spile().args(["ls"]).env("SPILE_RUN_DIR", dir).output().unwrap();
    assert!(ls.status.success() && text_of(&ls).contains("4242"), "{}", text_of(&ls));
    assert!(fails(dir, 1, &["show", "evil.control"]).contains("4242"));
    fs::write(dir.join("u.raw"), [0; 4096]).unwrap();
    let successor = ["serve", "u.raw", "--nbd", "unix:n", "--control", "evil.control", "--takeover"];
    assert!(fails(dir, 1, &successor).contains("4242"));
    // To see that somebody listens there is allowed.
    while let Ok((mut stream, _)) = listener.accept() {
        let mut said = Vec::new();
        stream.set_nonblocking(false).unwrap();
        stream.read_to_end(&mut said).unwrap();
        assert!(said.is_empty(), "somebody has spoken to it: {}", String::from_utf8_lossy(&said));
    }
}

#[test]
fn a_begin_that_fails_leaves_nothing_and_what_is_not_gone_on_with_goes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("there")).unwrap();
    let there = receive(dir);
    let id = "a7".repeat(16);
    let begin = |size: u64, name: &str| {
        Client::connect(&there.export(&format!(".spile-receive/begin/{id}/{size}/{name}"))).map(drop)
    };
    let left = || fs::read_dir(dir.join("there")).unwrap().count();
    for (size, name) in [(u64::MAX, "a.raw"), (u64::MAX, "a.vhd"), (u64::MAX - 511, "a.qcow2"), (1 << 62, "b.vhd")] {
        assert!(begin(size, name).is_err(), "{name}");
        assert_eq!(left(), 0, "{name}");
    }
    begin(1 << 20, "a.raw").expect("the same move may begin with a size that can be");
    let begun = (0..400).filter(|number| begin(1 << 20, &format!("d{number}.raw")).is_ok()).count();
    assert!((50..200).contains(&begun), "{begun} were begun");
    assert_eq!(left(), 2 * (begun + 1), "one that is refused leaves nothing");
    let link = "3c".repeat(16);
    let used = Client::connect(&there.export(&format!(".spile-receive/go-on/{id}/{link}/d0.raw"))).unwrap();
    used.write(0, &[1; 4096], true).unwrap();
    drop(used);
    assert!(there.terminate().success());
    let names: Vec<_> = fs::read_dir(dir.join("there")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.len() <= 4 && names.iter().all(|name| name.to_string_lossy().contains("d0.raw")), "{names:?}");
    assert_eq!(json(dir, &["receive", "there", "--list"])["disks"][0]["state"], "half");
}
