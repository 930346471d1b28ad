//! The configuration space: what may be read and written of it, and how a guest hears that it has changed.

use std::os::fd::AsFd;
use std::time::Duration;

use spile_core::Disk;
use spile_lab::vhost::proto::{Header, Request, VERSION, config_payload, feature, protocol_feature, vring_state};
use spile_lab::vhost::{BackendChannel, BackendRequest, BlkConfig, Connection};

use crate::common::engines::{on_each_engine, run_on_aio};
use crate::common::guest::{FLUSH, Guest, IOERR, OK, Options, R, WRITE, assert_hung_up, assert_refused, negotiate};
use crate::common::messages::answer;
use crate::common::{PATIENCE, Rig, SIZE, rig, until};

fn connect(rig: &Rig) -> Connection {
    negotiate(&rig.path(), &Options::default()).0
}

/// What GET_CONFIG answers; nothing when it is refused.
fn get(connection: &Connection, offset: u32, len: u32) -> Option<Vec<u8>> {
    let payload = config_payload(offset, 0, &vec![0; len as usize]);
    let reply = connection.ask(Request::GetConfig, &payload, &[]).unwrap().payload;
    (!reply.is_empty()).then(|| {
        assert_eq!(reply[..8], payload[..8]);
        reply[12..].to_vec()
    })
}

/// A growing disk on worker 0 of the rig's engine.
fn grow(rig: &Rig, size: u64) {
    let disk = rig.disk.clone();
    rig.engine.run_on(0, move || async move { disk.resize(size).await.unwrap() });
    rig.server.disk_has_changed();
}

on_each_engine! {
    fn any_part_of_the_space_can_be_read_and_nothing_beyond(kind) {
        let rig = rig(kind);
        let connection = connect(&rig);
        let whole = get(&connection, 0, 256).unwrap();
        assert_eq!(whole[..8], (SIZE / 512).to_le_bytes());
        assert_eq!(whole[60..], [0; 196], "behind the fields there are zeroes");
        for (offset, len) in [(0, 0), (0, 60), (5, 9), (32, 1), (59, 1), (200, 56), (255, 1), (256, 0)] {
            let part = get(&connection, offset, len).unwrap();
            assert_eq!(part, whole[offset as usize..(offset + len) as usize], "{offset} + {len}");
        }
        for (offset, len) in [(0, 257), (1, 256), (255, 2), (256, 1), (u32::MAX, 1), (u32::MAX, 0), (u32::MAX - 3, 8)] {
            assert_eq!(get(&connection, offset, len), None, "{offset} + {len}");
        }
        // A length that is not that of the payload breaks the message.
        let lie = [0u32, 61, 0].map(u32::to_ne_bytes).concat();
        assert!(answer(&connection, Request::GetConfig as u32, &[&lie[..], &[0; 60]].concat(), &[]).is_none());
        rig.assert_serves();
    }

    fn only_the_write_cache_can_be_switched(kind) {
        let rig = rig(kind);
        let guest = rig.guest();
        let before = get(&guest.connection, 0, 60);
        for (offset, bytes) in [(0, &[1][..]), (31, &[0]), (33, &[0]), (34, &[9, 9]), (59, &[0]), (60, &[0]), (255, &[0]), (0, &[])] {
            assert_refused("another field", guest.connection.set_config(offset, bytes));
        }
        assert_eq!(get(&guest.connection, 0, 60), before);
        for (offset, bytes) in [(256, &[0][..]), (200, &[0; 57]), (u32::MAX, &[0]), (0, &[0; 257])] {
            let connection = connect(&rig);
            assert!(connection.set_config(offset, bytes).is_err(), "{offset} + {}", bytes.len());
            assert_hung_up("beyond the space", &connection);
        }
        // A front end that takes a guest in writes back all that was read; nothing but the switch changes.
        let mut all = before.clone().unwrap();
        (all[0], all[32]) = (77, 0);
        guest.connection.set_config(0, &all).unwrap();
        let after = get(&guest.connection, 0, 60).unwrap();
        assert_eq!((after[0], after[32]), (before.unwrap()[0], 0));
    }

    fn the_write_cache_is_switched_only_by_those_who_agreed_to_it(kind) {
        let rig = rig(kind);
        let features = !(feature::BLK_CONFIG_WCE | feature::LOG_ALL);
        let guest = Guest::with(&rig.path(), Options { features, ..Options::default() });
        assert_refused("the switch", guest.connection.set_config(BlkConfig::WRITEBACK_AT, &[0]));
        assert_eq!(guest.connection.config().unwrap().writeback, 1);
    }

    fn a_guest_hears_that_its_disk_has_grown(kind) {
        let rig = rig(kind);
        let mut guests = [rig.guest(), rig.guest()];
        let channels = guests.each_ref().map(|guest| {
            let (ours, theirs) = BackendChannel::new().unwrap();
            guest.connection.set_backend_channel(theirs.as_fd()).unwrap();
            ours
        });
        let area = guests[0].take(512);
        let write = |guest: &mut Guest| guest.run(0, WRITE, SIZE / 512, &[(area.address, 512, R)]).0;
        assert_eq!(write(&mut guests[0]), IOERR);
        grow(&rig, SIZE * 2);
        for (guest, channel) in guests.iter().zip(&channels) {
            assert_eq!(channel.next(PATIENCE).unwrap(), Some(BackendRequest::ConfigChange));
            assert_eq!(guest.connection.config().unwrap().size_bytes(), SIZE * 2);
        }
        assert_eq!(write(&mut guests[0]), OK);
    }

    fn who_has_no_channel_or_did_not_agree_to_it_hears_nothing(kind) {
        let rig = rig(kind);
        let protocol = !protocol_feature::BACKEND_REQ;
        let guests = [Guest::with(&rig.path(), Options { protocol, ..Options::default() }), rig.guest()];
        let (channel, theirs) = BackendChannel::new().unwrap();
        guests[0].connection.set_backend_channel(theirs.as_fd()).unwrap();
        grow(&rig, SIZE * 2);
        assert_eq!(channel.next(Duration::ZERO).unwrap(), None);
        assert_eq!(guests[1].connection.config().unwrap().size_bytes(), SIZE * 2);
    }

    fn a_channel_that_is_full_closed_or_no_socket_holds_up_nobody(kind) {
        let rig = rig(kind);
        let guests = [rig.guest(), rig.guest(), rig.guest(), rig.guest()];
        let (full, theirs) = BackendChannel::new().unwrap();
        // The front end fills it itself, from the server's end.
        rustix::io::ioctl_fionbio(&theirs, true).unwrap();
        while rustix::io::write(&theirs, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        guests[0].connection.set_backend_channel(theirs.as_fd()).unwrap();
        let (closed, theirs) = BackendChannel::new().unwrap();
        guests[1].connection.set_backend_channel(theirs.as_fd()).unwrap();
        drop(closed);
        guests[2].connection.set_backend_channel(guests[2].rings[0].err.as_fd()).unwrap();
        let (well, theirs) = BackendChannel::new().unwrap();
        guests[3].connection.set_backend_channel(theirs.as_fd()).unwrap();
        grow(&rig, SIZE * 2);
        assert_eq!(well.next(PATIENCE).unwrap(), Some(BackendRequest::ConfigChange));
        drop(full);
        for mut guest in guests {
            guest.assert_works(0);
        }
    }

    fn who_waits_for_the_disk_holds_up_no_notice(kind) {
        let rig = rig(kind);
        let (mut waiting, other) = (rig.guest(), rig.guest());
        let channels = [&waiting, &other].map(|guest| {
            let (ours, theirs) = BackendChannel::new().unwrap();
            guest.connection.set_backend_channel(theirs.as_fd()).unwrap();
            ours
        });
        rig.disk.hold();
        waiting.ask(0, FLUSH, 0, &[]);
        until("it is in flight", || rig.disk.held() == 1);
        // The server answers that only once the flush has ended.
        let stop = Header { request: 11, flags: VERSION, len_bytes: 8 };
        waiting.connection.socket().send_raw(stop, &vring_state(0, 0), &[]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        grow(&rig, SIZE * 2);
        for channel in &channels {
            assert_eq!(channel.next(PATIENCE).unwrap(), Some(BackendRequest::ConfigChange));
        }
        assert_eq!(rig.disk.held(), 1);
        rig.disk.release();
        assert_eq!(waiting.connection.socket().receive().unwrap().payload, vring_state(0, 1));
    }

    fn who_is_within_a_message_holds_up_no_notice(kind) {
        let rig = rig(kind);
        let (stuck, guest) = (connect(&rig), rig.guest());
        let (channel, theirs) = BackendChannel::new().unwrap();
        guest.connection.set_backend_channel(theirs.as_fd()).unwrap();
        stuck.socket().send_bytes(&[1, 0, 0], &[]).unwrap();
        until("the stuck one is heard", || rig.server.connections() == 2);
        grow(&rig, SIZE * 2);
        // The one who is stuck would be hung up on only after seconds.
        assert_eq!(channel.next(PATIENCE).unwrap(), Some(BackendRequest::ConfigChange));
        stuck.socket().send_bytes(&[0, 1, 0, 0, 0, 0, 0, 0, 0], &[]).unwrap();
        assert_ne!(stuck.socket().receive().unwrap().u64().unwrap(), 0, "it was held up until it was hung up on");
    }
}
