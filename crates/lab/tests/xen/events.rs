//! Event channels, the host's own bounds, and its end.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use spile_core::ErrorKind;
use spile_lab::xen::{Guest, Host, Hypervisor};
use spile_xen::store::wire::Header;
use spile_xen::store::{Tx, XenStore};
use spile_xen::{Channel, DomId, EventChannels, Port};

use crate::common::{DOMAIN, World};

fn bind(hypervisor: &Hypervisor, port: Port) -> (OwnedFd, OwnedFd) {
    match hypervisor.bind(DOMAIN, port).unwrap() {
        Channel::Eventfds(kick, call) => (kick, call),
        Channel::Device(..) => panic!("the stand-in has no device"),
    }
}

/// How often it was rung since the last time.
fn rings(eventfd: impl AsFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(eventfd, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        Err(rustix::io::Errno::AGAIN) => 0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_ends_ring_and_a_channel_rings_when_it_is_bound() {
    let world = World::new(4);
    let event = world.guest.alloc_unbound(DomId(0)).unwrap();
    let (kick, call) = bind(&world.hypervisor, event.port);
    assert_eq!((rings(&kick), rings(&kick)), (1, 0));
    event.notify();
    event.notify();
    assert_eq!(rings(&kick), 2);
    rustix::io::write(&call, &1u64.to_ne_bytes()).unwrap();
    assert_eq!((rings(&event.call), rings(&event.kick)), (1, 0));
    drop((kick, call));
    // A back end that comes after one that was killed.
    event.notify();
    let later = Hypervisor::connect(world.dir.path()).unwrap();
    assert_eq!(rings(bind(&later, event.port).0), 2, "what was rung meanwhile is not lost");
}

#[test]
fn a_port_that_is_not_there_or_not_for_us_is_refused() {
    let world = World::new(4);
    let foreign = world.guest.alloc_unbound(DomId(9)).unwrap();
    let closed = world.guest.alloc_unbound(DomId(0)).unwrap();
    world.guest.close(closed.port).unwrap();
    let kind = |domain, port| world.hypervisor.bind(domain, port).unwrap_err().kind();
    assert_eq!(kind(DOMAIN, foreign.port), ErrorKind::Denied);
    assert_eq!(kind(DOMAIN, closed.port), ErrorKind::NotFound);
    assert_eq!(kind(DOMAIN, Port(0)), ErrorKind::NotFound);
    assert_eq!(kind(DOMAIN, Port(u32::MAX)), ErrorKind::NotFound);
    assert_eq!(kind(DomId(9), closed.port), ErrorKind::NotFound);
    assert_eq!(world.guest.close(closed.port).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_guest_has_so_many_ports_and_no_more() {
    let world = World::new(4);
    let first = world.guest.alloc_unbound(DomId(0)).unwrap().port;
    let error = (0..2000).find_map(|_| world.guest.alloc_unbound(DomId(0)).err()).expect("a bound");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    world.guest.close(first).unwrap();
    assert_ne!(world.guest.alloc_unbound(DomId(0)).unwrap().port, first, "a late message to it must not go astray");
}

#[test]
fn a_domain_is_there_once_and_its_socket_goes_with_it() {
    let world = World::new(4);
    let create = |id| Guest::create(world.dir.path(), DomId(id), 4096).map(drop).unwrap_err().kind();
    assert_eq!(create(DOMAIN.0), ErrorKind::Exists);
    assert_eq!((create(0), create(0x7ff0)), (ErrorKind::InvalidInput, ErrorKind::InvalidInput));
    assert!(world.guest.xenstored().exists());
    world.hypervisor.destroy(DOMAIN).unwrap();
    assert!(!world.guest.xenstored().exists());
    assert_eq!(world.hypervisor.destroy(DOMAIN).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(world.guest.alloc_unbound(DomId(0)).is_err(), "it is no domain any more");
}

#[test]
fn a_folder_has_one_host_and_a_new_one_when_that_has_gone() {
    let World { hypervisor, guest, host, dir } = World::new(4);
    assert_eq!(Host::start(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
    drop(host);
    assert!(!dir.path().join("hypervisor").exists() && !dir.path().join("xenstored").exists());
    assert!(hypervisor.bind(DOMAIN, Port(1)).is_err());
    // What a killed one leaves behind.
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("xenstored")).unwrap());
    let host = Host::start(dir.path()).unwrap();
    assert!(UnixStream::connect(host.xenstored()).is_ok());
    drop(guest);
    Guest::create(dir.path(), DOMAIN, 4096).unwrap();
}

#[test]
fn a_rude_client_of_xenstored_harms_itself_only() {
    let world = World::new(4);
    let mut good = XenStore::open(&world.host.xenstored()).unwrap();
    let connect = || {
        let stream = UnixStream::connect(world.host.xenstored()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        stream
    };
    let header = |kind: u32, len: u32| Header { kind, req_id: 5, tx_id: 0, len }.encode();
    let mut long = connect();
    long.write_all(&header(2, 4097)).unwrap();
    assert_eq!(long.read(&mut [0; 100]).unwrap(), 0, "cut off");
    let mut half = connect();
    half.write_all(&header(11, 100)[..9]).unwrap();
    drop(half);
    let mut unknown = connect();
    unknown.write_all(&header(99, 0)).unwrap();
    let mut answer = [0; 23];
    unknown.read_exact(&mut answer).unwrap();
    assert_eq!((answer[0], &answer[16..]), (16, &b"ENOSYS\0"[..]));
    good.write(Tx::NONE, "/good", "1").unwrap();
}

#[test]
fn a_guest_cannot_take_all_connections() {
    let world = World::new(4);
    let mut streams: Vec<_> = (0..200).map(|_| UnixStream::connect(world.guest.xenstored()).unwrap()).collect();
    // The last to come is turned away once its turn has come.
    let last = streams.last_mut().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    assert_eq!(last.read(&mut [0; 1]).unwrap(), 0);
    let mut store = XenStore::open(&world.host.xenstored()).unwrap();
    assert_eq!(store.read(Tx::NONE, "/local/domain/3/domid").unwrap(), b"3");
    drop(streams);
    let mut own = XenStore::open(&world.guest.xenstored()).unwrap();
    assert_eq!(own.own_domid().unwrap(), DOMAIN);
}
