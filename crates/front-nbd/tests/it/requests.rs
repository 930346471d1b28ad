//! Every command, its flags and its errors.

use std::sync::atomic::Ordering;

use spile_core::ErrorKind;
use spile_core::metrics::Op;
use spile_front_nbd::errors::{EINVAL, EIO, ENOSPC, ENOTSUP, EOVERFLOW, EPERM};
use spile_front_nbd::wire::reply::{STATE_HOLE, STATE_ZERO};
use spile_front_nbd::wire::request::{Command, FLAG_DF, FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE, FLAG_REQ_ONE};
use spile_store::MemStore;

use crate::client::{connect, ready};
use crate::disk::StoreDisk;
use crate::engines::{on_each_engine, run_on_aio};
use crate::{SIZE, rig, rig_with};

const MIB: u64 = 1 << 20;

on_each_engine! {
    fn what_is_written_is_read(kind) {
        let rig = rig(kind);
        for structured in [false, true] {
            let mut client = ready(&rig.path(), structured);
            for (offset, len) in [(0, 1), (511, 4098), (SIZE - 7, 7), (MIB, 3 << 20)] {
                let data: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
                assert_eq!(client.call_write(0, offset, &data).errno, 0);
                assert!(client.read(offset, len as u32) == data, "{offset} {len}");
            }
        }
    }

    fn requests_of_32_mib_and_not_more(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        let max = 32 << 20;
        // The disk is smaller: the length itself is allowed, the range is not.
        assert_eq!(client.call(Command::Read, 0, 0, max).errno, EINVAL);
        assert_eq!(client.call(Command::Read, 0, 0, max + 1).message, "the request is longer than 32 MiB");
        assert_eq!(client.call(Command::Read, FLAG_DF, 0, max + 1).errno, EOVERFLOW);
        assert_eq!(client.call(Command::Read, 0, 0, u32::MAX).errno, EINVAL);
        let payload = vec![1; max as usize + 1];
        assert_eq!(client.call_write(0, 0, &payload[1..]).errno, ENOSPC);
        assert_eq!(client.call_write(0, 0, &payload).errno, EINVAL);
        assert_eq!(client.read(0, 512), [0; 512]);
    }

    fn past_the_end(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1), (u64::MAX - 511, 512), (SIZE + 1, 0)] {
            assert_eq!(client.call(Command::Read, 0, offset, len).errno, EINVAL);
            assert_eq!(client.call(Command::Trim, 0, offset, len).errno, EINVAL);
            assert_eq!(client.call(Command::WriteZeroes, 0, offset, len).errno, ENOSPC);
            assert_eq!(client.call(Command::Cache, 0, offset, len).errno, EINVAL);
            assert_eq!(client.call(Command::BlockStatus, 0, offset, len).errno, EINVAL);
            assert_eq!(client.call_write(0, offset, &vec![1; len as usize]).errno, ENOSPC);
        }
    }

    fn a_client_gets_no_answer_to_what_is_left_undone(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.call_write(0, 0, &[1; 512]).errno, 0);
        rig.disk.fail_next(ErrorKind::Shutdown);
        client.write(0, 0, &[2; 512]);
        assert!(client.at_end(), "the client is told something");
        // It connects again, and does it again.
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.call_write(0, 0, &[2; 512]).errno, 0);
    }

    fn a_read_only_export_refuses_writes(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        client.enter("ro", true);
        assert_eq!(client.call_write(0, 0, &[1; 4096]).errno, EPERM);
        assert_eq!(client.call(Command::Trim, 0, 0, 4096).errno, EPERM);
        assert_eq!(client.call(Command::WriteZeroes, 0, 0, 4096).errno, EPERM);
        assert_eq!(client.call(Command::Flush, 0, 0, 0).errno, 0);
        assert_eq!(client.read(0, 4096), [0; 4096]);
    }

    fn requests_of_no_bytes(kind) {
        let rig = rig(kind);
        for structured in [false, true] {
            let mut client = ready(&rig.path(), structured);
            assert_eq!(client.read(4096, 0), []);
            assert_eq!(client.call_write(0, 0, &[]).errno, 0);
            assert_eq!(client.call(Command::Trim, 0, 0, 0).errno, 0);
            assert_eq!(client.call(Command::WriteZeroes, 0, 0, 0).errno, 0);
            assert_eq!(client.call(Command::Cache, 0, 0, 0).errno, 0);
            assert_eq!(client.call(Command::BlockStatus, 0, 0, 0).errno, EINVAL);
            assert_eq!(client.read(SIZE, 0), []);
        }
    }

    fn unknown_commands_and_flags(kind) {
        let rig = rig(kind);
        for structured in [false, true] {
            let mut client = ready(&rig.path(), structured);
            for number in [8, 9, 255, u16::MAX] {
                assert_eq!(client.call(Command::Unknown(number), 0, 0, 4096).errno, EINVAL);
            }
            for command in [Command::Read, Command::Flush, Command::Trim, Command::Cache, Command::WriteZeroes] {
                let len = if command == Command::Flush { 0 } else { 512 };
                assert_eq!(client.call(command, 1 << 15, 0, len).errno, EINVAL);
                assert_eq!(client.call(command, FLAG_REQ_ONE, 0, len).errno, EINVAL);
            }
            assert_eq!(client.call_write(FLAG_NO_HOLE, 0, &[1; 512]).errno, EINVAL);
            assert_eq!(client.read(0, 512), [0; 512]);
        }
        let mut client = ready(&rig.path(), false);
        assert_eq!(client.call(Command::Read, FLAG_DF, 0, 512).errno, EINVAL, "DF was not offered");
    }

    fn misaligned_requests_are_refused_where_the_disk_demands_it(kind) {
        let rig = rig_with(kind, |disk, _| disk.align_bytes = 512);
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.call(Command::Read, 0, 1, 512).errno, EINVAL);
        assert_eq!(client.call(Command::Read, 0, 512, 511).errno, EINVAL);
        assert_eq!(client.call_write(0, 3, &[1; 512]).errno, EINVAL);
        assert_eq!(client.call(Command::Trim, 0, 1, 512).errno, EINVAL);
        assert_eq!(client.read(512, 512), [0; 512]);
    }

    fn fua_on_every_command(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.call_write(FLAG_FUA, 0, &[1; 512]).errno, 0);
        assert_eq!(rig.disk.calls.fua_writes.load(Ordering::Relaxed), 1);
        let flushes = || rig.disk.calls.flushes.load(Ordering::Relaxed);
        for (command, len, flushed) in [
            (Command::Trim, 512, 1), (Command::WriteZeroes, 512, 2), (Command::Flush, 0, 3),
            (Command::Read, 512, 3), (Command::Cache, 512, 3), (Command::BlockStatus, 512, 3),
        ] {
            assert_eq!(client.call(command, FLAG_FUA, 0, len).errno, 0, "{command:?}");
            assert_eq!(flushes(), flushed, "{command:?}");
        }
    }

    fn a_flush_has_no_range(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.call(Command::Flush, 0, 0, 0).errno, 0);
        assert_eq!(client.call(Command::Flush, 0, 512, 0).errno, EINVAL);
        assert_eq!(client.call(Command::Flush, 0, 0, 512).errno, EINVAL);
        assert_eq!(rig.disk.calls.flushes.load(Ordering::Relaxed), 1);
    }

    fn zeroes_and_trims(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.call_write(0, 0, &[7; 1 << 20]);
        assert_eq!(client.call(Command::WriteZeroes, FLAG_NO_HOLE, 4096, 8192).errno, 0);
        assert_eq!(client.call(Command::Trim, 0, 65536, 65536).errno, 0);
        let mut expected = vec![7; 1 << 20];
        expected[4096..12288].fill(0);
        expected[65536..131072].fill(0);
        assert!(client.read(0, 1 << 20) == expected);
    }

    fn a_fast_zero_that_would_be_slow_fails_and_changes_nothing(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.call_write(0, 0, &[7; 4096]);
        let flags = FLAG_FAST_ZERO | FLAG_NO_HOLE;
        assert_eq!(client.call(Command::WriteZeroes, flags, 0, 4096).errno, ENOTSUP);
        assert_eq!(client.read(0, 4096), [7; 4096]);
        assert_eq!(client.call(Command::WriteZeroes, FLAG_FAST_ZERO, 0, 4096).errno, 0);
        assert_eq!(client.read(0, 4096), [0; 4096]);
    }

    fn structured_reads_have_holes_and_df_has_none(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.call_write(0, 128 << 10, &[7; 64 << 10]);
        let len = 256 << 10;
        let answer = client.call(Command::Read, 0, 0, len);
        let shape: Vec<_> = answer.content.iter().map(|(at, data, hole)| (*at, data.len(), *hole)).collect();
        assert_eq!(shape, [(0, 128 << 10, true), (128 << 10, 64 << 10, false), (192 << 10, 64 << 10, true)]);
        let whole = client.call(Command::Read, FLAG_DF, 0, len);
        assert_eq!(whole.content.len(), 1);
        assert!(whole.data(0, len as usize) == answer.data(0, len as usize));
        let reads = rig.disk.calls.reads.load(Ordering::Relaxed);
        let hole = client.call(Command::Read, 0, 2 << 20, 1 << 20);
        assert!(hole.content.len() == 1 && hole.content[0].2);
        assert_eq!(rig.disk.calls.reads.load(Ordering::Relaxed), reads, "a hole is not read");
        rig.disk.holds_back.store(true, Ordering::Relaxed);
        let limited = client.call(Command::Read, 0, 2 << 20, 1 << 20);
        assert!(limited.content.len() == 1 && limited.content[0].2);
        assert_eq!(rig.disk.calls.reads.load(Ordering::Relaxed), reads + 1, "a limit must see each read");
    }

    fn block_status_tells_the_map(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.call_write(0, MIB, &[7; 1 << 20]);
        let hole = STATE_HOLE | STATE_ZERO;
        let status = client.call(Command::BlockStatus, 0, 0, SIZE as u32).status;
        assert_eq!(status, [(1 << 20, hole), (1 << 20, 0), (SIZE as u32 - (2 << 20), hole)]);
        let one = client.call(Command::BlockStatus, FLAG_REQ_ONE, MIB + 4096, 4 << 20).status;
        assert_eq!(one, [((1 << 20) - 4096, 0)]);
        let mut plain = ready(&rig.path(), false);
        assert_eq!(plain.call(Command::BlockStatus, 0, 0, 4096).errno, EINVAL);
    }

    fn a_failing_disk_is_told_with_text_and_offset(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        rig.disk.fail_next(ErrorKind::Io);
        let answer = client.call(Command::Read, 0, 8192, 4096);
        assert_eq!((answer.errno, answer.error_offset), (EIO, Some(8192)));
        assert_eq!(answer.message, "injected failure");
        rig.disk.fail_next(ErrorKind::NoSpace);
        assert_eq!(client.call_write(0, 0, &[1; 512]).errno, ENOSPC);
        assert_eq!(client.read(0, 512), [0; 512], "the connection goes on");
        let mut simple = ready(&rig.path(), false);
        rig.disk.fail_next(ErrorKind::Io);
        assert_eq!(simple.call(Command::Read, 0, 0, 4096).errno, EIO);
        assert_eq!(simple.read(0, 512), [0; 512]);
    }

    fn a_panicking_disk_costs_an_error_and_nothing_else(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        rig.disk.panic_next();
        assert_eq!(client.call(Command::Read, 0, 0, 4096).errno, EIO);
        assert_eq!(client.read(0, 512), [0; 512]);
        drop(client);
        rig.assert_clean();
    }

    /// More panics than there are slots, and jobs behind them that wait for a slot.
    fn panics_use_up_no_slots(kind) {
        let rig = rig_with(kind, |_, config| config.max_in_flight = 2);
        let mut client = ready(&rig.path(), false);
        for _ in 0..6 {
            rig.disk.panic_next();
            (0..2).for_each(|_| { client.request(Command::Read, 0, 0, 512); });
            let answers = [(); 2].map(|()| client.answer(|_| Some((0, 512))).errno);
            assert_eq!(answers.iter().filter(|errno| **errno == EIO).count(), 1, "{answers:?}");
        }
        drop(client);
        rig.assert_clean();
    }

    fn replies_overtake_a_slow_request(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        rig.disk.hold_at(4096);
        let slow = client.request(Command::Read, 0, 4096, 512);
        for _ in 0..300 {
            assert_eq!(client.read(0, 512), [0; 512]);
        }
        rig.until("only the slow one is left", |rig| rig.server.metrics("").requests.in_flight() == 1);
        rig.disk.release();
        assert_eq!(client.answer(|_| None).cookie, slow);
    }

    fn a_disconnect_waits_for_what_is_in_flight(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        rig.disk.hold_at(4096);
        let slow = client.request(Command::Read, 0, 4096, 512);
        client.request(Command::Disconnect, 0, 0, 0);
        rig.until("the read is held", |rig| rig.disk.held() == 1);
        rig.disk.release();
        assert_eq!(client.answer(|_| None).cookie, slow);
        assert!(client.at_end());
        rig.assert_clean();
    }

    fn stopping_answers_what_is_in_flight(kind) {
        let rig = rig(kind);
        let mut idle = ready(&rig.path(), false);
        let mut shaking = connect(&rig.path());
        shaking.greet();
        let mut client = ready(&rig.path(), true);
        rig.disk.hold_at(4096);
        let slow = client.request(Command::Read, 0, 4096, 512);
        rig.until("the read is held", |rig| rig.disk.held() == 1);
        rig.server.stop();
        assert!(idle.at_end() && shaking.at_end());
        rig.disk.release();
        assert_eq!(client.answer(|_| None).cookie, slow);
        assert!(client.at_end());
        assert!(rig.server.wait_drained(std::time::Duration::from_secs(600)));
        assert!(std::os::unix::net::UnixStream::connect(rig.path()).is_err());
    }

    fn stopping_gives_up_on_who_does_not_read(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), false);
        for _ in 0..8 {
            client.request(Command::Read, 0, 0, 4 << 20);
        }
        rig.until("replies are stuck", |rig| rig.server.metrics("").requests.in_flight() == 8);
        rig.server.stop();
        assert!(!rig.server.wait_drained(std::time::Duration::from_millis(50)));
        rig.assert_clean();
    }

    /// A long request is done in parts; when the server gives up on its client, the parts that are left are not done.
    fn a_hang_up_ends_long_requests(kind) {
        let rig = rig_with(kind, |disk, _| *disk = StoreDisk::new(MemStore::new(1 << 30)));
        let mut client = ready(&rig.path(), true);
        rig.disk.hold_at(0);
        client.request(Command::WriteZeroes, 0, 0, 1 << 30);
        rig.until("the first part is held", |rig| rig.disk.held() == 1);
        rig.server.stop();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| rig.server.wait_drained(std::time::Duration::from_millis(50)));
            assert!(client.at_end(), "the hang-up comes before the part is done");
            rig.disk.release();
            assert!(!waiting.join().unwrap());
        });
        assert_eq!(rig.disk.calls.zeroes.load(Ordering::Relaxed), 1);
    }

    fn metrics_count_what_was_done(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        for _ in 0..10 {
            client.call_write(0, 0, &[1; 4096]);
            client.read(0, 512);
        }
        client.call(Command::Read, 0, SIZE, 512);
        rig.until("the last departs", |rig| rig.server.metrics("").requests.in_flight() == 0);
        let metrics = rig.server.metrics("");
        let metrics = metrics.requests;
        let (reads, writes) = (metrics.op(Op::Read), metrics.op(Op::Write));
        assert_eq!((reads.ended, reads.errors, reads.bytes), (11, 1, 5120));
        assert_eq!((writes.ended, writes.errors, writes.bytes), (10, 0, 40960));
        assert_eq!((reads.latency.count(), writes.latency.count()), (11, 10));
        let latency_sum_ns = metrics.total().latency.sum_ns;
        assert_eq!(metrics.depth_integral_ns, latency_sum_ns, "Little's law, nothing in flight");
        assert_eq!(rig.server.metrics("no such export").requests.op(Op::Read).ended, 0);
    }
}
