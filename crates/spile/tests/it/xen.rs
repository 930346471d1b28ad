//! `spile xen-backend` over a Xen of ordinary processes: disks that come and go, are paused, and whose processes are killed.

use std::time::Duration;

use crate::common::xen::{BLOCK, BLOCKS, Load, Xen, chain, content, request, start_backend, wait_until};
use crate::common::{Blow, assert_silent, json, ok, spile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spile_lab::GuestQueue;
use spile_lab::xen::Blkfront;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_xen::DomId;

const KILLS: u32 = 50;

/// What a guest under load is like, if nothing else is said.
fn guest_options() -> BlkfrontOptions {
    BlkfrontOptions { queues: 2, depth: 16, data_bytes: BLOCK, indirect_segments: 32, ..BlkfrontOptions::default() }
}

fn ended_under_load(mut xen: Xen, access: &str, options: BlkfrontOptions, blow: Blow, blows: u32) {
    let mut vbd = Vbd::new(DomId(3), format!("vhd:{}", chain(xen.dir.path()).display()));
    vbd.extra.push(("spile-access".into(), access.into()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let depth = options.depth;
    let mut front = Blkfront::new(xen.guest(3), vbd.device, options).unwrap();
    let mut load = Load::new(front.start().unwrap());
    assert_eq!(load.queues.iter().map(Queue::slots).collect::<Vec<_>>(), [depth; 2]);
    let mut pid = xen.process(&vbd, None);
    for turn in 0..blows {
        if blow == Blow::Panic {
            // The process panics by itself, over and over.
            load.run_until(|| xen.process_now(&vbd).is_some_and(|other| other != pid));
            pid = xen.process(&vbd, Some(pid));
            continue;
        }
        // Now and then the next end comes while the successor begins.
        if turn % 4 == 3 {
            let pause = load.roll(60);
            std::thread::sleep(Duration::from_millis(pause));
            load.submit();
        } else {
            load.run(200);
        }
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        pid = xen.process(&vbd, Some(pid));
    }
    load.run(1000);
    load.drain();
    assert_eq!(front.backend_state().unwrap(), 4);
    let Load { queues, versions, .. } = load;
    xen.set_key(&vbd, "online", "0");
    xen.set_key(&vbd, "state", "5");
    front.stop(queues).unwrap();
    wait_until("the end of the process", || !xen.path("run/3-51712.pid").exists());
    let bytes: Vec<u8> = (0..BLOCKS).flat_map(|block| content(block, versions[block as usize])).collect();
    std::fs::write(xen.path("wanted.raw"), bytes).unwrap();
    ok(xen.dir.path(), &["compare", "wanted.raw", "disk.vhd"]);
    assert_eq!(json(xen.dir.path(), &["check", "disk.vhd"])["result"], "sound");
}

#[test]
fn a_process_that_is_killed_fifty_times_loses_nothing_and_the_guest_sees_no_error() {
    ended_under_load(Xen::start(), "copy", guest_options(), Blow::Kill, KILLS);
}

#[test]
fn so_it_is_with_a_process_that_panics() {
    let mut command = spile();
    Blow::Panic.prepare(&mut command, 300);
    ended_under_load(Xen::start_by(command, &[]), "copy", guest_options(), Blow::Panic, KILLS / 2);
}

#[test]
fn so_it_is_with_pages_that_stay_mapped() {
    let options = BlkfrontOptions { persistent: true, ..guest_options() };
    ended_under_load(Xen::start(), "persistent", options, Blow::Kill, KILLS / 5);
}

/// Twice as many requests are in flight as the ring of requests has slots, and while nobody serves it, the others wait.
#[test]
fn so_it_is_with_split_rings() {
    let options = BlkfrontOptions { split_response_order: Some(0), depth: 64, ..guest_options() };
    ended_under_load(Xen::start_with(&["--split-rings"]), "copy", options, Blow::Kill, KILLS / 5);
}

#[test]
fn a_load_uses_split_rings_where_they_are_offered_and_says_where_not() {
    for is_offered in [true, false] {
        let xen = Xen::start_with(if is_offered { &["--split-rings"] } else { &[] });
        ok(xen.dir.path(), &["create", "a.raw", "--size", "8M"]);
        let (disk, params) =
            (format!("xen-lab:{}", xen.dir.path().display()), format!("raw:{}", xen.path("a.raw").display()));
        let mut command = spile();
        command.args(["load", &disk, "--params", &params, "--rw", "randrw", "--verify", "--ios", "3000"]);
        let done = command.args(["--depth", "128", "--split-responses"]).output().expect("the program starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.success(), is_offered, "{said}");
        assert!(is_offered || said.contains("--split-rings"), "{said}");
    }
}

#[test]
fn disks_come_and_go_and_outlive_the_back_end() {
    let mut xen = Xen::start();
    let guests = [xen.guest(3), xen.guest(4)];
    let mut fronts = Vec::new();
    for guest in &guests {
        for device in [51712, 51728] {
            let name = format!("{}-{device}.raw", guest.id());
            ok(xen.dir.path(), &["create", &name, "--size", "1M"]);
            let vbd = Vbd { device, ..Vbd::new(guest.id(), format!("raw:{}", xen.path(&name).display())) };
            add_vbd(&mut xen.store, &vbd).unwrap();
            let mut front = Blkfront::new(guest.clone(), device, BlkfrontOptions::default()).unwrap();
            let mut queue = front.start().unwrap().remove(0);
            queue.data(0).fill(guest.id().0 as u8);
            request(&mut queue, Op::Write, 4096, 4096);
            fronts.push((vbd, front, queue, xen.path(&name)));
        }
    }
    let pids: Vec<_> = fronts.iter().map(|(vbd, ..)| xen.process(vbd, None)).collect();
    // Another back end takes them as they are.
    xen.backend.kill().unwrap();
    xen.backend.wait().unwrap();
    fronts.iter_mut().for_each(|(_, _, queue, _)| request(queue, Op::Read, 4096, 4096));
    xen.backend = start_backend(xen.dir.path(), &[]);
    kill(Pid::from_raw(pids[0]), Signal::SIGKILL).unwrap();
    assert_ne!(xen.process(&fronts[0].0, Some(pids[0])), pids[0]);
    for (number, (vbd, _, queue, file)) in fronts.iter_mut().enumerate() {
        request(queue, Op::Read, 4096, 4096);
        assert_eq!(queue.data(0).slice(0..4096).to_vec(), vec![vbd.guest.0 as u8; 4096]);
        assert_eq!(std::fs::read(file).unwrap()[4096..8192], vec![vbd.guest.0 as u8; 4096]);
        assert!(number == 0 || xen.process(vbd, None) == pids[number]);
    }
    for (vbd, mut front, queue, _) in fronts {
        xen.set_key(&vbd, "online", "0");
        xen.set_key(&vbd, "state", "5");
        front.stop(vec![queue]).unwrap();
        let file = xen.path(&format!("run/{}-{}.pid", vbd.guest, vbd.device));
        wait_until("the end of the process", || !file.exists());
        assert_eq!(xen.key(&vbd, "state").as_deref(), Some("6"));
    }
}

#[test]
fn a_disk_grows_under_its_guest() {
    let mut xen = Xen::start();
    ok(xen.dir.path(), &["create", "a.raw", "--size", "1M"]);
    let vbd = Vbd::new(DomId(3), format!("{}", xen.path("a.raw").display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    ok(xen.dir.path(), &["resize", "run/3-51712.control", "2M"]);
    wait_until("the new size", || front.refresh().unwrap().size_bytes() == 2 << 20);
    request(&mut queue, Op::Write, (2 << 20) - 4096, 4096);
}

#[test]
fn the_process_of_a_disk_says_what_it_serves_and_leaves_changes_to_the_toolstack() {
    let mut xen = Xen::start();
    let (vbd, _front, mut queue) = xen.attach();
    request(&mut queue, Op::Write, 0, 4096);
    let (dir, control) = (xen.dir.path().to_owned(), "run/3-51712.control");
    let shown = crate::common::json(&dir, &["show", control]);
    let way = serde_json::json!([{ "protocol": "xen", "address": vbd.backend_path(), "name": "", "tls": "none" }]);
    assert_eq!((&shown["exports"], &shown["name"]), (&way, &"a".into()));
    let meters = shown["meters"].as_array().unwrap();
    let layers: Vec<_> = meters.iter().filter_map(|meter| meter["layer"].as_str()).collect();
    assert!(matches!(layers[..], ["front xen", "disk", image] if image.starts_with("image /")), "{layers:?}");
    let refused = crate::common::fails(&dir, 1, &["attach", control, "null:1M", "--nbd", "unix:n"]);
    assert!(refused.contains("serves that disk only") && refused.contains("toolstack"), "{refused}");
    let refused =
        crate::common::fails(&dir, 1, &["serve", "null:1M", "--nbd", "unix:n", "--control", control, "--takeover"]);
    assert!(refused.contains("is not handed over"), "{refused}");
    request(&mut queue, Op::Write, 0, 4096);
}

/// Takes the disk from its guest, and compares what the image at `name` holds with what the guest has written. The `snapshots`, bytes of
/// a file and its path, must not have changed.
fn end_and_compare(
    xen: &mut Xen,
    vbd: &Vbd,
    mut front: Blkfront,
    mut load: Load,
    name: &str,
    snapshots: Vec<(Vec<u8>, String)>,
) {
    load.run(200);
    load.drain();
    let Load { queues, versions, .. } = load;
    xen.set_key(vbd, "online", "0");
    xen.set_key(vbd, "state", "5");
    front.stop(queues).unwrap();
    wait_until("the end of the process", || !xen.path("run/3-51712.pid").exists());
    let bytes: Vec<u8> = (0..BLOCKS).flat_map(|block| content(block, versions[block as usize])).collect();
    std::fs::write(xen.path("wanted.raw"), bytes).unwrap();
    ok(xen.dir.path(), &["compare", "wanted.raw", name]);
    for (bytes, name) in snapshots {
        assert!(std::fs::read(&name).unwrap() == bytes, "{name} was changed after it was made");
    }
}

/// A toolstack takes a snapshot of a disk under load, again and again: in a pause, it puts a child on top of the image,
/// which is from then on what is served. Now and then the disk's process is killed while it is to pause.
#[test]
fn a_toolstack_takes_snapshots_of_a_disk_in_use() {
    let mut xen = Xen::start();
    let mut name = chain(xen.dir.path()).display().to_string();
    let vbd = Vbd::new(DomId(3), format!("vhd:{name}"));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, guest_options()).unwrap();
    let mut load = Load::new(front.start().unwrap());
    let mut snapshots = Vec::new();
    for number in 0..8 {
        load.run(200);
        load.submit();
        if number % 3 == 2 {
            xen.set_key(&vbd, "pause", "");
            kill(Pid::from_raw(xen.process(&vbd, None)), Signal::SIGKILL).unwrap();
        }
        xen.pause(&vbd);
        // Nobody else has it: a writer's lock can be had at once.
        ok(xen.dir.path(), &["check", "--repair", &name]);
        load.collect();
        let done = load.done;
        let child = xen.path(&format!("child-{number}.vhd")).display().to_string();
        ok(xen.dir.path(), &["create", &child, "--parent", &name]);
        std::thread::sleep(Duration::from_millis(20));
        load.collect();
        assert_eq!(load.done, done, "an answer in the pause");
        snapshots.push((std::fs::read(&name).unwrap(), name));
        xen.set_key(&vbd, "params", &format!("vhd:{child}"));
        xen.go_on(&vbd);
        name = child;
    }
    end_and_compare(&mut xen, &vbd, front, load, &name, snapshots);
}

/// The process of a disk makes snapshots itself, under load, and is killed now and then: the path in xenstore stays the disk's.
#[test]
fn the_process_of_a_disk_makes_snapshots_under_load() {
    let mut xen = Xen::start();
    let name = chain(xen.dir.path()).display().to_string();
    let vbd = Vbd::new(DomId(3), format!("vhd:{name}"));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, guest_options()).unwrap();
    let mut load = Load::new(front.start().unwrap());
    let mut snapshots = Vec::new();
    for number in 0..6 {
        load.run(200);
        load.submit();
        let made = json(xen.dir.path(), &["snapshot", "run/3-51712.control", "--name", &format!("s{number}")]);
        let snapshot = made["snapshot_path"].as_str().unwrap().to_owned();
        assert!(made["trouble"].is_null(), "{made}");
        snapshots.push((std::fs::read(&snapshot).unwrap(), snapshot));
        if number % 2 == 1 {
            let pid = xen.process(&vbd, None);
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
            xen.process(&vbd, Some(pid));
        }
    }
    end_and_compare(&mut xen, &vbd, front, load, &name, snapshots);
}

/// Whoever mends a disk that cannot be opened gets the pause that he needs for it; then it is served.
#[test]
fn a_disk_that_cannot_be_opened_can_be_paused() {
    let mut xen = Xen::start();
    let vbd = Vbd::new(DomId(3), format!("raw:{}", xen.path("late.raw").display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    xen.pause(&vbd);
    ok(xen.dir.path(), &["create", "late.raw", "--size", "1M"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(front.backend_state().unwrap(), 1, "it was served in the pause");
    xen.go_on(&vbd);
    let mut queue = front.start().unwrap().remove(0);
    request(&mut queue, Op::Write, 0, 4096);
}

/// Another back end, that comes in the pause, keeps it.
#[test]
fn a_pause_outlives_the_back_end() {
    let mut xen = Xen::start();
    let (vbd, _front, mut queue) = xen.attach();
    xen.pause(&vbd);
    wait_until("the end of the process", || !xen.path("run/3-51712.pid").exists());
    xen.backend.kill().unwrap();
    xen.backend.wait().unwrap();
    xen.backend = start_backend(xen.dir.path(), &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!xen.path("run/3-51712.pid").exists(), "it is served in the pause");
    xen.go_on(&vbd);
    request(&mut queue, Op::Write, 0, 4096);
}

#[test]
fn a_disk_whose_guest_is_idle_wakes_nobody() {
    let mut xen = Xen::start();
    chain(xen.dir.path());
    let vbd = Vbd::new(DomId(3), format!("vhd:{}", xen.path("disk.vhd").display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, guest_options()).unwrap();
    let mut queues = front.start().unwrap();
    for queue in &mut queues {
        request(queue, Op::Write, 0, 4096);
        request(queue, Op::Flush, 0, 0);
    }
    let backend = xen.backend.id();
    assert_silent(xen.process(&vbd, None) as u32, "the disk's process");
    assert_silent(backend, "the back end");
}

/// A disk that cannot be opened is tried again and again, slowly, and served once it can be.
#[test]
fn a_disk_that_is_not_there_yet_is_served_when_it_is() {
    let mut xen = Xen::start();
    let vbd = Vbd::new(DomId(3), format!("raw:{}", xen.path("late.raw").display()));
    add_vbd(&mut xen.store, &vbd).unwrap();
    let mut front = Blkfront::new(xen.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(front.backend_state().unwrap(), 1);
    ok(xen.dir.path(), &["create", "late.raw", "--size", "1M"]);
    let mut queue = front.start().unwrap().remove(0);
    request(&mut queue, Op::Write, 0, 4096);
}
