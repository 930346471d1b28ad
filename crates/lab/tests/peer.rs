//! The front end against a server that no one here wrote: qemu-storage-daemon.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use spile_core::ErrorKind;
use spile_lab::GuestQueue;
use spile_lab::vhost::proto::{feature, protocol_feature};
use spile_lab::vhost::{Device, DeviceOptions, LinkState, Op, Queue, QueueOptions, STATUS_OK, Watch};

const PROGRAM: &str = "qemu-storage-daemon";
const DISK_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(600);

/// A running server with one disk, ended when dropped.
struct Server {
    child: Child,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves a raw file with `queues` queues; `None`, with the reason printed, where the program is not installed.
fn serve(name: &str, queues: u16) -> Option<Server> {
    serve_node(name, queues, |dir| {
        let disk = dir.join("d.raw");
        std::fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        format!("file,node-name=d,filename={},discard=unmap", disk.display())
    })
}

fn serve_node(name: &str, queues: u16, node: impl FnOnce(&Path) -> String) -> Option<Server> {
    let installed = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !installed {
        println!("SKIP {name}: {PROGRAM} is not installed");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let export = format!(
        "vhost-user-blk,id=e,node-name=d,writable=on,num-queues={queues},addr.type=unix,addr.path={}",
        socket.display()
    );
    let mut command = Command::new(PROGRAM);
    command.arg("--blockdev").arg(node(dir.path())).arg("--export").arg(export);
    Some(Server { child: command.spawn().unwrap(), socket, _dir: dir })
}

/// Connects, once the server listens.
fn connect(server: &Server, without: u64) -> Device {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Device::connect(&server.socket, DeviceOptions::without(without)) {
            Ok(device) => return device,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start(server: &Server, without: u64, options: &QueueOptions) -> (Device, Vec<Queue>) {
    let mut device = connect(server, without);
    assert_eq!(device.features() & without, 0);
    let queues = device.start(options).unwrap();
    (device, queues)
}

fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ seed as u8).collect()
}

/// Writes and reads in all slots at once, by sleeping or by polling.
fn exercise(queue: &mut Queue, poll: bool) {
    let (slots, len) = (queue.slots(), 32 << 10);
    for op in [Op::Write, Op::Read] {
        for slot in 0..slots {
            match op {
                Op::Write => queue.data(slot).copy_from_slice(0, &pattern(slot as u32, len)),
                _ => queue.data(slot).fill(0),
            }
            queue.submit(slot, op, (slot * len) as u64, len as u32);
        }
        queue.publish();
        while queue.outstanding() > 0 {
            let woken = if poll { queue.spin(PATIENCE) } else { queue.sleep(PATIENCE) };
            assert!(woken.unwrap(), "no answer");
            while let Some(done) = queue.take().unwrap() {
                assert_eq!(done.status, STATUS_OK);
            }
        }
    }
    for slot in 0..slots {
        assert_eq!(queue.data(slot).slice(0..len).to_vec(), pattern(slot as u32, len), "slot {slot}");
    }
}

#[test]
fn bytes_come_back_under_every_mix_of_features_and_memory() {
    let Some(server) = serve("bytes_come_back_under_every_mix_of_features_and_memory", 1) else { return };
    for without in [0, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::EVENT_IDX | feature::INDIRECT_DESC] {
        for (segment_bytes, regions) in [(None, 1), (Some(4096), 1), (Some(1536), 3)] {
            let options = QueueOptions { segment_bytes, regions, depth: 9, ..QueueOptions::default() };
            let (_device, mut queues) = start(&server, without, &options);
            exercise(&mut queues[0], false);
            exercise(&mut queues[0], true);
        }
    }
}

#[test]
fn a_ring_goes_round_many_times() {
    let Some(server) = serve("a_ring_goes_round_many_times", 1) else { return };
    for without in [0, feature::EVENT_IDX | feature::INDIRECT_DESC] {
        let options = QueueOptions { depth: 3, ring_size: 16, data_bytes: 512, ..QueueOptions::default() };
        let (_device, mut queues) = start(&server, without, &options);
        let queue = &mut queues[0];
        // The indices wrap at 65536.
        let mut left = 70_000;
        while left > 0 || queue.outstanding() > 0 {
            for slot in 0..3 {
                if left > 0 && !queue.is_outstanding(slot) {
                    left -= 1;
                    queue.data(slot).fill(left as u8);
                    queue.submit(slot, Op::Write, left % 1000 * 512, 512);
                }
            }
            queue.publish();
            assert!(queue.sleep(PATIENCE).unwrap());
            while let Some(done) = queue.take().unwrap() {
                assert_eq!(done.status, STATUS_OK);
            }
        }
        assert_eq!(queue.read(7 * 512, 512).unwrap(), [7; 512]);
    }
}

#[test]
fn every_operation_is_served() {
    let Some(server) = serve("every_operation_is_served", 1) else { return };
    let (mut device, mut queues) = start(&server, 0, &QueueOptions::default());
    assert_eq!(device.config().size_bytes(), DISK_BYTES);
    let queue = &mut queues[0];
    queue.write(0, &[7; 65536]).unwrap();
    queue.run_well(Op::Flush, 0, 0).unwrap();
    queue.run_well(Op::WriteZeroes { unmap: false }, 4096, 8192).unwrap();
    queue.run_well(Op::WriteZeroes { unmap: true }, 16384, 4096).unwrap();
    queue.run_well(Op::Discard, 32768, 4096).unwrap();
    let back = queue.read(0, 65536).unwrap();
    let zero = |at: usize| (4096..12288).contains(&at) || (16384..20480).contains(&at) || (32768..36864).contains(&at);
    assert!(back.iter().enumerate().all(|(at, byte)| *byte == if zero(at) { 0 } else { 7 }));
    assert!(!queue.disk_id().unwrap().is_empty());
    let past = queue.run(Op::Read, DISK_BYTES, 512).unwrap();
    assert_ne!(past.status, STATUS_OK);
    assert_eq!(queue.run_well(Op::Read, DISK_BYTES, 512).unwrap_err().kind(), ErrorKind::Io);
    if device.features() & feature::BLK_CONFIG_WCE != 0 {
        device.set_writeback(false).unwrap();
        assert_eq!(device.read_config().unwrap().writeback, 0);
    }
}

#[test]
fn queues_work_side_by_side() {
    let Some(server) = serve("queues_work_side_by_side", 4) else { return };
    let options = QueueOptions { queues: 4, depth: 4, ..QueueOptions::default() };
    let (device, queues) = start(&server, 0, &options);
    assert_eq!(device.max_queues(), 4);
    std::thread::scope(|scope| {
        for (number, mut queue) in queues.into_iter().enumerate() {
            scope.spawn(move || {
                let base = number as u64 * (8 << 20);
                for round in 0..50 {
                    let bytes = pattern(round, 16384);
                    queue.write(base, &bytes).unwrap();
                    assert_eq!(queue.read(base, 16384).unwrap(), bytes);
                }
            });
        }
    });
}

#[test]
fn a_stopped_ring_goes_on_where_it_was() {
    let Some(server) = serve("a_stopped_ring_goes_on_where_it_was", 1) else { return };
    let (device, mut queues) = start(&server, 0, &QueueOptions { depth: 5, ..QueueOptions::default() });
    for round in 1..5 {
        exercise(&mut queues[0], false);
        let bases = device.stop().unwrap();
        assert_eq!(bases, [round * 10]);
        device.resume(&bases).unwrap();
    }
}

#[test]
fn written_pages_are_logged() {
    let Some(server) = serve("written_pages_are_logged", 1) else { return };
    let (mut device, mut queues) = start(&server, 0, &QueueOptions { depth: 2, ..QueueOptions::default() });
    if device.connection().protocol_features() & protocol_feature::LOG_SHMFD == 0 {
        println!("SKIP written_pages_are_logged: {PROGRAM} keeps no dirty log");
        return;
    }
    let queue = &mut queues[0];
    queue.read(0, 4096).unwrap();
    let log = device.start_log().unwrap();
    assert!(log.dirty_pages().is_empty());
    queue.read(0, 8192).unwrap();
    // The server may answer before it logs.
    let pages = || device.log().unwrap().dirty_pages().len();
    let deadline = Instant::now() + PATIENCE;
    while pages() < 3 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(pages() >= 3, "two pages of data, the status, the used ring: {pages:?}", pages = pages());
    assert!(device.stop_log().unwrap().is_some());
}

#[test]
fn the_end_of_a_server_is_told_to_a_sleeping_queue() {
    let Some(mut server) = serve("the_end_of_a_server_is_told_to_a_sleeping_queue", 1) else { return };
    let (device, mut queues) = start(&server, 0, &QueueOptions::default());
    let can_reconnect = device.can_reconnect();
    let watch = Watch::start(device, None, None).unwrap();
    queues[0].read(0, 512).unwrap();
    server.child.kill().unwrap();
    let error = queues[0].sleep(PATIENCE).unwrap_err();
    assert_eq!((error.kind(), queues[0].link().state()), (ErrorKind::Io, LinkState::Lost));
    let mut device = watch.stop();
    if !can_reconnect {
        assert_eq!(device.reconnect(Duration::ZERO).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}

#[test]
fn a_null_disk_is_read_at_any_depth() {
    let node = |_: &Path| format!("null-co,node-name=d,size={DISK_BYTES},read-zeroes=on");
    let Some(server) = serve_node("a_null_disk_is_read_at_any_depth", 1, node) else { return };
    for depth in [1, 128, 1000] {
        let options = QueueOptions { depth, data_bytes: 4096, segment_bytes: Some(1024), ..QueueOptions::default() };
        let (_device, mut queues) = start(&server, 0, &options);
        let queue = &mut queues[0];
        let mut done = 0;
        while done < 5000 {
            for slot in 0..queue.slots() {
                if !queue.is_outstanding(slot) {
                    queue.submit(slot, Op::Read, (slot as u64 % 100) * 4096, 4096);
                }
            }
            queue.publish();
            assert!(queue.sleep(PATIENCE).unwrap());
            while queue.take().unwrap().is_some() {
                done += 1;
            }
        }
    }
}
