//! Handshakes over a socket.

use spile_core::Disk;
use spile_front_nbd::errors::EINVAL;
use spile_front_nbd::wire::handshake::{option, rep, transmission};
use spile_front_nbd::wire::request::Command;

use crate::client::{connect, go_data, meta_data, option_bytes};
use crate::engines::{on_each_engine, run_on_aio};
use crate::{SIZE, rig};

on_each_engine! {
    fn byte_by_byte_is_understood(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        let mut stream = 3u32.to_be_bytes().to_vec();
        stream.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
        stream.extend(option_bytes(option::SET_META_CONTEXT, &meta_data("", &["base:allocation"])));
        stream.extend(option_bytes(option::GO, &go_data("")));
        client.take::<18>();
        stream.iter().for_each(|byte| client.send(&[*byte]));
        assert_eq!(client.option_reply(option::STRUCTURED_REPLY).0, rep::ACK);
        assert_eq!(client.option_reply(option::SET_META_CONTEXT).0, rep::META_CONTEXT);
        assert_eq!(client.option_reply(option::SET_META_CONTEXT).0, rep::ACK);
        while client.option_reply(option::GO).0 != rep::ACK {}
        assert_eq!(client.read(0, 512), [0; 512]);
    }

    fn export_name_enters_with_simple_replies(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        client.option(option::EXPORT_NAME, b"ro");
        assert_eq!(u64::from_be_bytes(client.take()), SIZE);
        let flags = u16::from_be_bytes(client.take());
        assert!(flags & transmission::READ_ONLY != 0 && flags & transmission::SEND_DF == 0);
        assert_eq!(client.read(0, 4096), [0; 4096]);
    }

    fn flags_tell_what_the_export_can_do(kind) {
        use transmission as t;
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        let (size, flags) = client.enter("", true);
        let writes = t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO;
        let always = t::HAS_FLAGS | t::SEND_FLUSH | t::SEND_FUA | t::CAN_MULTI_CONN | t::SEND_CACHE;
        assert_eq!((size, flags), (SIZE, always | writes | t::SEND_DF));
        let mut client = connect(&rig.path());
        client.greet();
        assert_eq!(client.enter("ro", false).1, always | t::READ_ONLY);
    }

    fn a_request_sent_together_with_go_is_answered(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        let mut bytes = option_bytes(option::GO, &go_data(""));
        let request = spile_front_nbd::wire::request::Request {
            flags: 0, command: Command::Flush, cookie: 9, offset_bytes: 0, len_bytes: 0,
        };
        bytes.extend(request.encode());
        client.send(&bytes);
        while client.option_reply(option::GO).0 != rep::ACK {}
        assert_eq!(client.answer(|_| None).cookie, 9);
    }

    fn abort_is_acknowledged_and_ends(kind) {
        let rig = rig(kind);
        let mut client = connect(&rig.path());
        client.greet();
        assert_eq!(client.ask(option::ABORT, &[])[0].0, rep::ACK);
        assert!(client.at_end());
        rig.assert_clean();
    }

    fn many_clients_at_once(kind) {
        let rig = rig(kind);
        let mut clients: Vec<_> = (0..20).map(|_| crate::client::ready(&rig.path(), true)).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.call_write(0, index as u64 * 4096, &[index as u8 + 1; 4096]).errno, 0);
        }
        for (index, client) in clients.iter_mut().rev().enumerate() {
            assert_eq!(client.read(index as u64 * 4096, 4096), [index as u8 + 1; 4096]);
        }
        assert_eq!(rig.server.metrics("").connections, 20);
        drop(clients);
        rig.assert_clean();
    }

    fn a_client_is_held_to_the_size_it_was_told(kind) {
        let rig = rig(kind);
        let mut before = crate::client::ready(&rig.path(), true);
        let mut meanwhile = connect(&rig.path());
        meanwhile.greet();
        let disk = rig.disk.clone();
        rig.engine.run_on(0, move || async move { disk.resize(2 * SIZE).await }).unwrap();
        let mut after = connect(&rig.path());
        after.greet();
        let sizes = [SIZE, meanwhile.enter("", true).0, after.enter("", true).0];
        assert_eq!(sizes[2], 2 * SIZE);
        for (client, size) in [&mut before, &mut meanwhile, &mut after].into_iter().zip(sizes) {
            assert_eq!(client.read(size - 512, 512), [0; 512]);
            assert_eq!(client.call(Command::Read, 0, size, 512).errno, EINVAL);
            assert_eq!(client.call(Command::Read, 0, size - 512, 1024).errno, EINVAL);
        }
        let mut by_name = connect(&rig.path());
        by_name.greet();
        by_name.option(option::EXPORT_NAME, b"ro");
        assert_eq!(u64::from_be_bytes(by_name.take()), 2 * SIZE);
    }

    fn a_client_too_many_is_turned_away(kind) {
        let rig = crate::rig_with(kind, |_, config| config.max_connections = 2);
        let _kept: Vec<_> = (0..2).map(|_| crate::client::ready(&rig.path(), false)).collect();
        assert!(connect(&rig.path()).at_end());
    }
}

#[test]
fn exports_need_fit_and_unique_names() {
    use spile_core::ErrorKind;
    use spile_engine::{Config, Engine, EngineKind};
    use spile_front_nbd::{Export, Server, ServerConfig};
    use spile_store::MemStore;
    use std::sync::Arc;
    let config = Config { kind: EngineKind::Threads, workers: 1, pool_bytes: 2 << 20, ..Config::default() };
    let engine = Engine::start(config).unwrap();
    let disk = Arc::new(crate::disk::StoreDisk::new(MemStore::new(512)));
    let long = "x".repeat(4097);
    for names in [&["a", "a"][..], &["nul\0"], &[&long]] {
        let export = |name: &&str| Export {
            name: name.to_string(),
            description: String::new(),
            disk_name: String::new(),
            disk: disk.clone(),
            read_only: false,
            checkpoints: None,
            kept: |_| None,
            withdrawn: Arc::default(),
        };
        let exports = names.iter().map(export).collect();
        let result = Server::new(engine.clone(), ServerConfig::default(), exports);
        assert_eq!(result.err().map(|e| e.kind()), Some(ErrorKind::InvalidInput));
    }
    engine.shutdown();
}

#[test]
fn only_a_listening_stream_socket_can_be_listened_on() {
    use spile_core::ErrorKind;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    let rig = rig(spile_engine::EngineKind::Threads);
    let others: [OwnedFd; 3] = [
        UnixStream::pair().unwrap().0.into(),
        UnixDatagram::unbound().unwrap().into(),
        std::fs::File::open("/dev/null").unwrap().into(),
    ];
    for fd in others {
        assert_eq!(rig.server.listen(fd).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
