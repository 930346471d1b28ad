//! Clients that break every rule: none may hurt the server or another client.

use std::time::Duration;

use spile_front_nbd::errors::EPERM;
use spile_front_nbd::wire::handshake::{OPTION_MAGIC, option, rep};
use spile_front_nbd::wire::request::{Command, Request};

use crate::client::{connect, go_data, meta_data, option_bytes, ready};
use crate::engines::{on_each_engine, run_on_aio};
use crate::{Rig, rig, rig_with};

/// The server still serves others, and nothing is left of the hostile ones.
fn assert_unhurt(rig: &Rig) {
    rig.assert_clean();
    let mut client = ready(&rig.path(), true);
    assert_eq!(client.read(0, 512).len(), 512);
}

fn full_handshake() -> Vec<u8> {
    let mut stream = 3u32.to_be_bytes().to_vec();
    stream.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    stream.extend(option_bytes(option::LIST, &[]));
    stream.extend(option_bytes(option::SET_META_CONTEXT, &meta_data("", &["base:allocation"])));
    stream.extend(option_bytes(option::GO, &go_data("")));
    stream
}

fn request(command: Command, len_bytes: u32) -> [u8; 28] {
    Request { flags: 0, command, cookie: 1, offset_bytes: 0, len_bytes }.encode()
}

on_each_engine! {
    fn close_at_every_handshake_byte(kind) {
        let rig = rig(kind);
        let stream = full_handshake();
        for cut in 0..=stream.len() {
            let mut client = connect(&rig.path());
            client.send(&stream[..cut]);
        }
        assert_unhurt(&rig);
    }

    fn half_close_at_every_handshake_byte(kind) {
        let rig = rig(kind);
        let stream = full_handshake();
        for cut in (0..=stream.len()).step_by(3) {
            let mut client = connect(&rig.path());
            client.send(&stream[..cut]);
            client.half_close();
            client.read_to_end();
        }
        assert_unhurt(&rig);
    }

    fn close_at_every_byte_of_a_write(kind) {
        let rig = rig(kind);
        let stream = [&request(Command::Write, 600)[..], &[9; 600]].concat();
        for cut in (0..stream.len()).step_by(7) {
            let mut client = ready(&rig.path(), true);
            client.send(&stream[..cut]);
        }
        rig.assert_clean();
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.read(0, 600), [0; 600], "no torn write reached the disk");
    }

    fn never_negotiate(kind) {
        let rig = rig_with(kind, |_, config| config.handshake_timeout = Duration::from_millis(200));
        let mut silent = connect(&rig.path());
        silent.take::<18>();
        assert!(silent.at_end());
        let mut slow = connect(&rig.path());
        slow.greet();
        slow.option(option::LIST, &[]);
        slow.read_to_end();
        assert_unhurt(&rig);
    }

    fn the_time_out_ends_with_the_handshake(kind) {
        let rig = rig_with(kind, |_, config| config.handshake_timeout = Duration::from_millis(300));
        let mut client = ready(&rig.path(), true);
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(client.read(0, 512), [0; 512]);
    }

    /// CVE-2024-7409: many who connect and never negotiate must not keep the server from others.
    fn a_crowd_that_never_negotiates(kind) {
        let rig = rig(kind);
        let crowd: Vec<_> = (0..100).map(|_| connect(&rig.path())).collect();
        let mut client = ready(&rig.path(), true);
        assert_eq!(client.read(0, 512), [0; 512]);
        drop(client);
        drop(crowd);
        assert_unhurt(&rig);
    }

    /// CVE-2017-9524: a client that is gone before it is greeted.
    fn gone_before_the_greeting(kind) {
        let rig = rig(kind);
        (0..200).for_each(|_| drop(connect(&rig.path())));
        assert_unhurt(&rig);
    }

    /// CVE-2017-7539: gone in the middle of the options, with an answer on its way.
    fn gone_while_it_is_answered(kind) {
        let rig = rig(kind);
        for _ in 0..50 {
            let mut client = connect(&rig.path());
            client.send(&3u32.to_be_bytes());
            (0..20).for_each(|_| client.option(option::LIST, &[]));
        }
        assert_unhurt(&rig);
    }

    /// CVE-2020-10761 and CVE-2019-14850's kin: names of the greatest length, and longer.
    fn names_of_4096_bytes(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        let name = "n".repeat(4096);
        for option in [option::INFO, option::GO] {
            let replies = client.ask(option, &go_data(&name));
            assert_eq!(replies[0].0, rep::ERR_UNKNOWN);
            assert!(replies[0].1.len() <= 4096);
            assert_eq!(client.ask(option, &go_data(&"n".repeat(4097)))[0].0, rep::ERR_INVALID);
        }
        client.ask(option::STRUCTURED_REPLY, &[]);
        let replies = client.ask(option::SET_META_CONTEXT, &meta_data(&name, &["base:allocation"]));
        assert_eq!(replies[0].0, rep::ERR_UNKNOWN);
        let long = format!("base:{}", "q".repeat(4092));
        let replies = client.ask(option::LIST_META_CONTEXT, &meta_data("", &[&long]));
        assert_eq!(replies[0].0, rep::ERR_INVALID);
        client.option(option::EXPORT_NAME, name.as_bytes());
        assert!(client.at_end());
        assert_unhurt(&rig);
    }

    fn option_lengths_of_all_ones(kind) {
        let rig = rig(kind);
        for option in [option::EXPORT_NAME, option::GO, option::LIST, option::SET_META_CONTEXT, 4711] {
            let mut client = connect(&rig.path());
            client.greet();
            client.send(&[&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &[0xff; 4]].concat());
            assert!(client.at_end());
        }
        assert_unhurt(&rig);
    }

    fn inner_lengths_of_all_ones(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        client.ask(option::STRUCTURED_REPLY, &[]);
        for option in [option::GO, option::INFO, option::SET_META_CONTEXT, option::LIST_META_CONTEXT] {
            assert_eq!(client.ask(option, &[0xff; 40])[0].0, rep::ERR_INVALID);
            assert_eq!(client.ask(option, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff])[0].0, rep::ERR_INVALID);
            assert_eq!(client.ask(option, &[])[0].0, rep::ERR_INVALID);
        }
        assert_eq!(client.enter("", true).0, crate::SIZE);
    }

    fn a_long_option_is_skipped(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        assert_eq!(client.ask(option::GO, &vec![0; 1 << 20])[0].0, rep::ERR_TOO_BIG);
        assert_eq!(client.ask(4711, &vec![0; 3 << 20])[0].0, rep::ERR_UNSUP);
        assert_eq!(client.enter("", true).0, crate::SIZE);
    }

    fn unknown_options(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        for option in [0, 4, 11, 12, 1 << 31, u32::MAX] {
            assert_eq!(client.ask(option, b"data")[0].0, rep::ERR_UNSUP);
        }
        assert_eq!(client.enter("", true).0, crate::SIZE);
    }

    fn unknown_client_flags(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.take::<18>();
        client.send(&0x8000_0003u32.to_be_bytes());
        assert!(client.at_end());
    }

    fn commands_before_go(kind) {
        let rig = rig(kind);
        for command in [Command::Read, Command::Write, Command::Flush, Command::Disconnect] {
            let mut client = connect(&rig.path());
            client.greet();
            client.send(&request(command, 512));
            assert!(client.at_end());
            let mut client = connect(&rig.path());
            client.take::<18>();
            client.send(&request(command, 512));
            assert!(client.at_end());
        }
        assert_unhurt(&rig);
    }

    fn an_option_flood_is_bounded(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        let answered = (0..100_000).take_while(|_| {
            let sent = std::io::Write::write_all(&mut client.stream, &option_bytes(4711, &[]));
            sent.is_ok() && std::io::Read::read_exact(&mut client.stream, &mut [0; 34]).is_ok()
        });
        assert!(answered.count() <= 1024);
        assert_unhurt(&rig);
    }

    fn a_wrong_request_magic_ends_the_connection(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.send(&[0x5a; 28]);
        assert!(client.at_end());
        assert_unhurt(&rig);
    }

    fn a_write_too_long_to_skip_ends_the_connection(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), true);
        client.send(&request(Command::Write, u32::MAX));
        assert!(client.at_end());
        assert_unhurt(&rig);
    }

    fn a_refused_write_does_not_lose_the_frame(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        client.enter("ro", true);
        // The payload looks like requests: none of them may be obeyed.
        let payload: Vec<u8> = request(Command::Disconnect, 0).repeat(20_000);
        assert_eq!(client.call_write(0, 0, &payload).errno, EPERM);
        assert_eq!(client.read(0, 512), [0; 512]);
    }

    fn half_close_after_requests(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), false);
        rig.disk.hold_at(4096);
        client.request(Command::Read, 0, 4096, 512);
        (0..50).for_each(|_| { client.request(Command::Read, 0, 0, 512); });
        client.half_close();
        rig.until("the read is held", |rig| rig.disk.held() == 1);
        rig.disk.release();
        assert_eq!(client.read_to_end().len(), 51 * (16 + 512));
        assert_unhurt(&rig);
    }

    fn a_slow_reader_blocks_nobody_and_is_bounded(kind) {
        let rig = rig(kind);
        let mut slow = ready(&rig.path(), false);
        slow.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut bytes = request(Command::Read, 4 << 20);
        bytes[8..16].fill(0);
        // 100,000 reads of 4 MiB and not one reply taken: the server stops listening to it.
        let sent = (0..100_000).take_while(|_| {
            std::io::Write::write_all(&mut slow.stream, &bytes).is_ok()
        });
        assert!(sent.count() < 100_000);
        assert!(rig.server.metrics("").requests.in_flight() <= 16, "64 MiB are held at most");
        let mut others: Vec<_> = (0..4).map(|_| ready(&rig.path(), true)).collect();
        for client in &mut others {
            assert_eq!(client.read(0, 512), [0; 512]);
        }
        drop((slow, others));
        assert_unhurt(&rig);
    }

    fn requests_beyond_the_limit_wait(kind) {
        let rig = rig_with(kind, |_, config| config.max_in_flight = 4);
        let mut client = ready(&rig.path(), false);
        rig.disk.hold_at(0);
        (0..100).for_each(|_| { client.request(Command::Read, 0, 0, 512); });
        rig.until("four are held", |rig| rig.disk.held() == 4);
        assert_eq!(rig.server.metrics("").requests.in_flight(), 4);
        rig.disk.release();
        for _ in 0..100 {
            assert_eq!(client.answer(|_| Some((0, 512))).errno, 0);
        }
    }

    fn gone_with_requests_in_flight(kind) {
        let rig = rig(kind);
        rig.disk.hold_at(0);
        for _ in 0..5 {
            let mut client = ready(&rig.path(), true);
            (0..10).for_each(|_| { client.request(Command::Read, 0, 0, 512); });
        }
        rig.until("all are held", |rig| rig.disk.held() == 50);
        rig.disk.release();
        assert_unhurt(&rig);
    }

    fn cookies_may_repeat(kind) {
        let rig = rig(kind);
        let mut client = ready(&rig.path(), false);
        (0..20).for_each(|_| client.send(&request(Command::Read, 512)));
        for _ in 0..20 {
            assert_eq!(client.answer(|_| Some((0, 512))).cookie, 1);
        }
    }

    fn noise_is_survived(kind) {
        let rig = rig(kind);
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        for round in 0..60 {
            let mut client = if round % 2 == 0 { connect(&rig.path()) } else { ready(&rig.path(), true) };
            let noise: Vec<u8> = (0..500).map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 56) as u8
            }).collect();
            let _ = std::io::Write::write_all(&mut client.stream, &noise);
            client.half_close();
            client.read_to_end();
        }
        assert_unhurt(&rig);
    }
}
