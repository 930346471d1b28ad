//! What is noted of a disk's changes goes along to another host, with `spile receive`: no block that has changed is ever missing there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::common::moves::{full, job, let_go, receive, to};
use crate::common::nbd::Client;
use crate::common::{Served, eventually, json, ok, spile};

const MIB: usize = 1 << 20;
const BLOCK: usize = 64 << 10;

fn try_serve(dir: &Path, disk: &str) -> Result<Served, String> {
    let mut command = spile();
    command.args(["serve", disk, "--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n"))
}

fn serve(dir: &Path, disk: &str) -> Served {
    try_serve(dir, disk).unwrap_or_else(|err| panic!("serve {disk}: {err}"))
}

/// The numbers of the blocks that have changed since the checkpoint `since` of the disk.
fn changed(dir: &Path, disk: &str, since: &str) -> BTreeSet<usize> {
    let told = json(dir, &["changed", disk, "--since", since]);
    assert!(told["warning"].is_null(), "{told}");
    let ranges = told["ranges"].as_array().unwrap().iter();
    let blocks = ranges.flat_map(|range| {
        let [from, len] = ["offset_bytes", "length_bytes"].map(|key| range[key].as_u64().unwrap() as usize / BLOCK);
        from..from + len
    });
    blocks.collect()
}

fn write(served: &Served, block: usize) {
    Client::connect(&served.uri()).unwrap().write((block * BLOCK) as u64, &[9; 4096], true).unwrap();
}

#[test]
fn checkpoints_go_along_to_another_host_with_their_blocks() {
    let (dir, _) = full("marks-go", "there");
    let dir = dir.path();
    let mut there = receive(dir);
    let served = serve(dir, "old/marks-go.raw");
    ok(dir, &["backup", "marks-go", "there/base.raw", "--checkpoint", "first", "--wait"]);
    write(&served, 3);
    write(&served, 500);
    ok(dir, &["checkpoint", "marks-go", "second"]);
    write(&served, 7);
    json(dir, &["move", "marks-go", "--to", &to(dir, "disk.vhd"), "--rate", "16M", "--background"]);
    write(&served, 600);
    ok(dir, &["job", job(dir, "marks-go")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "marks-go")["state"] == "done");
    assert!(job(dir, "marks-go")["motion"]["trouble"].is_null(), "{}", job(dir, "marks-go"));
    // What comes by the link is noted there, also by the next process.
    write(&served, 8);
    there.kill();
    there = receive(dir);
    write(&served, 9);
    assert!(served.terminate().success());
    let_go(dir, "there/disk.vhd");
    let (first, second) = (BTreeSet::from([3, 7, 8, 9, 500, 600]), BTreeSet::from([7, 8, 9, 600]));
    assert_eq!(changed(dir, "there/disk.vhd", "first"), first);
    assert_eq!(changed(dir, "there/disk.vhd", "second"), second);
    // A server there goes on with them.
    let own = serve(dir, "there/disk.vhd,name=marks-own");
    write(&own, 10);
    assert_eq!(changed(dir, "marks-own", "second"), [7, 8, 9, 10, 600].into());
    // And so does a backup that was made at the old place.
    ok(dir, &["backup", "marks-own", "there/base.raw", "--since", "first", "--wait"]);
    assert!(own.terminate().success() && there.terminate().success());
    ok(dir, &["compare", "there/base.raw", "there/disk.vhd"]);
}

/// As at a host with an older program, which does not know what is asked of it.
#[test]
fn a_host_that_does_not_take_checkpoints_in_gets_the_disk_without_them() {
    goes_without_checkpoints(true);
}

#[test]
fn nothing_is_told_of_checkpoints_that_a_disk_does_not_have() {
    goes_without_checkpoints(false);
}

fn goes_without_checkpoints(has_some: bool) {
    let (dir, bytes) = full("marks-no", "there");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, "old/marks-no.raw");
    if has_some {
        ok(dir, &["checkpoint", "marks-no", "then"]);
    }
    json(dir, &["move", "marks-no", "--to", &to(dir, "disk.raw"), "--rate", "16M", "--background"]);
    // Nothing can be removed there that is no file.
    fs::create_dir(dir.join("there/.disk.raw.spile-new-changes")).unwrap();
    ok(dir, &["job", job(dir, "marks-no")["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "marks-no")["state"] == "done");
    let trouble = job(dir, "marks-no")["motion"]["trouble"].to_string();
    assert_eq!(trouble.contains("checkpoints did not go along"), has_some, "{trouble}");
    assert!(served.terminate().success());
    let_go(dir, "there/disk.raw");
    assert!(fs::read(dir.join("there/disk.raw")).unwrap() == bytes);
    let told = json(dir, &["checkpoint", "there/disk.raw", "--list"]);
    assert_eq!(told["checkpoints"].as_array().unwrap().len(), 0, "{told}");
    assert!(there.terminate().success());
}

/// Writes to blocks here and there until it is told to end, over all that happens to the server.
struct Writer(JoinHandle<()>, Arc<AtomicBool>);

impl Writer {
    fn start(served: &Served) -> Self {
        let (uri, ends) = (served.uri(), Arc::new(AtomicBool::new(false)));
        let told = ends.clone();
        let writer = thread::spawn(move || {
            let mut number = 1_u64;
            while !told.load(Ordering::SeqCst) {
                let Ok(client) = Client::connect(&uri) else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                loop {
                    number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let block = (number >> 33) % (48 * MIB / BLOCK) as u64;
                    // A third of the disk, at most.
                    let at = block / 3 * 3 * BLOCK as u64 + (number >> 20) % 16 * 4096;
                    let is_over = client.write(at, &[number as u8 | 1; 4096], number.is_multiple_of(64)).is_err();
                    if is_over || told.load(Ordering::SeqCst) {
                        break;
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self(writer, ends)
    }

    fn end(self) {
        self.1.store(true, Ordering::SeqCst);
        self.0.join().unwrap();
    }
}

/// Serves the disk where it is: at its old path, or on the other host.
fn serve_where_it_is(dir: &Path, name: &str) -> Served {
    let mut found = None;
    eventually("the disk is somewhere", || {
        let old = dir.join("old").join(format!("{name}.raw"));
        let tried = try_serve(dir, &format!("old/{name}.raw"));
        found = tried.or_else(|_| try_serve(dir, &format!("{},name={name}", to(dir, "disk.raw")))).ok();
        found.is_some() || old.exists() && panic!("it does not open")
    });
    found.unwrap()
}

/// Each block in which `now` differs from `then` is in `changed`.
fn assert_none_missing(then: &[u8], now: &[u8], changed: &BTreeSet<usize>) {
    let blocks = then.chunks(BLOCK).zip(now.chunks(BLOCK)).enumerate();
    let differ: BTreeSet<usize> = blocks.filter(|(_, (then, now))| then != now).map(|(number, _)| number).collect();
    let missing: Vec<_> = differ.difference(changed).collect();
    println!("{} blocks differ, {} are said to", differ.len(), changed.len());
    assert!(!differ.is_empty() && missing.is_empty(), "changed, and not noted: {missing:?}");
    // A third of the disk is written to, and not all of it was.
    assert!(changed.len() <= then.len() / BLOCK / 2, "{} blocks are said to have changed", changed.len());
}

/// Kills `kills_there` or this side at some moment of the copy, of the hand-over or after it, while a guest writes.
fn no_mark_is_missing_after_a_kill(name: &str, kills_there: bool, after_ms: u64) {
    let (dir, then) = full(name, "there");
    let dir = dir.path();
    let mut there = receive(dir);
    let mut served = serve(dir, &format!("old/{name}.raw"));
    ok(dir, &["checkpoint", name, "then"]);
    let writer = Writer::start(&served);
    json(dir, &["move", name, "--to", &to(dir, "disk.raw"), "--background"]);
    thread::sleep(Duration::from_millis(after_ms));
    if kills_there {
        there.kill();
        there = receive(dir);
    } else {
        served.kill();
        served = serve_where_it_is(dir, name);
    }
    eventually("it is there", || dir.join("there/disk.raw").exists() && !dir.join(format!("old/{name}.raw")).exists());
    thread::sleep(Duration::from_millis(50));
    writer.end();
    // What was not flushed when the other host was killed is noted as lost: the bytes are what they are.
    served.terminate();
    let_go(dir, "there/disk.raw");
    let now = fs::read(dir.join("there/disk.raw")).unwrap();
    assert_none_missing(&then, &now, &changed(dir, "there/disk.raw", "then"));
    assert!(there.terminate().success());
}

#[test]
fn no_mark_is_missing_when_the_other_host_is_killed() {
    for after_ms in [0, 150, 300, 450, 600, 900, 1300] {
        no_mark_is_missing_after_a_kill(&format!("marks-there-{after_ms}"), true, after_ms);
    }
}

#[test]
fn no_mark_is_missing_when_this_host_is_killed() {
    for after_ms in [0, 150, 300, 450, 600, 900, 1300] {
        no_mark_is_missing_after_a_kill(&format!("marks-here-{after_ms}"), false, after_ms);
    }
}
