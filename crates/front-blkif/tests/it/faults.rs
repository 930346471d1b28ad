//! What a host does wrong: a xenstore that is gone for a while, a channel that is not free yet.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use spile_core::{Error, ErrorKind, Result};
use spile_front_blkif::device::{Device, End};
use spile_front_blkif::pages::Access;
use spile_lab::xen::Hypervisor;
use spile_lab::xen::blkfront::BlkfrontOptions;
use spile_xen::store::XenStore;
use spile_xen::{Channel, DomId, EventChannels, Port};

use crate::common::{Setup, World, pattern, read, wait_until, write};

/// Starts a back end of its own kind in the place of the world's, which was stopped.
fn serve_by<E: EventChannels>(
    world: &mut World,
    events: Arc<E>,
    open_store: impl Fn() -> Result<XenStore> + Send + 'static,
) {
    let hypervisor = Arc::new(Hypervisor::connect(world.dir.path()).unwrap());
    let (engine, disk, config) = (world.engine.clone(), world.disk.clone(), world.config.clone());
    let device = Device::start(engine, disk, open_store, hypervisor, events, config, || {});
    world.device = Some(device.unwrap());
}

#[test]
fn a_guest_is_served_while_xenstore_is_gone() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.stop();
    let (is_gone, sockets) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let open = {
        let (path, is_gone, sockets) = (world.host.xenstored(), is_gone.clone(), sockets.clone());
        move || {
            let socket = UnixStream::connect(&path).map_err(|source| Error::io("connect", source))?;
            sockets.lock().unwrap().push(socket.try_clone().unwrap());
            match is_gone.load(Ordering::Acquire) {
                true => Err(Error::new(ErrorKind::NotFound, "no xenstore")),
                false => Ok(XenStore::from_socket(socket)),
            }
        }
    };
    let hypervisor = Arc::new(Hypervisor::connect(world.dir.path()).unwrap());
    serve_by(&mut world, hypervisor, open);
    write(&mut queue, 0, &pattern(1, 4096));
    for _ in 0..2 {
        is_gone.store(true, Ordering::Release);
        let tried = sockets.lock().unwrap().len();
        sockets.lock().unwrap().iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        wait_until("another try", || sockets.lock().unwrap().len() > tried);
        write(&mut queue, 4096, &pattern(2, 4096));
        assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
        is_gone.store(false, Ordering::Release);
    }
    // The toolstack is heard again.
    world.set_backend_key("online", "0");
    world.set_backend_key("state", "5");
    assert_eq!(front.wait_for(&[5]).unwrap(), 5);
    front.stop(vec![queue]).unwrap();
    assert_eq!(world.ended(), End::Closed);
}

#[test]
fn a_stop_is_heard_while_xenstore_is_gone() {
    let mut world = Setup::new(Access::Copy).start();
    let (_front, mut queue) = world.connect_one(BlkfrontOptions::default());
    world.stop();
    let (ours, theirs) = UnixStream::pair().unwrap();
    // A xenstore that has closed the connection before it is asked anything, and is not to be had again.
    drop(theirs);
    let ours = Mutex::new(Some(ours));
    let open = move || {
        let socket = ours.lock().unwrap().take();
        socket.map(XenStore::from_socket).ok_or_else(|| Error::new(ErrorKind::NotFound, "no xenstore"))
    };
    let hypervisor = Arc::new(Hypervisor::connect(world.dir.path()).unwrap());
    serve_by(&mut world, hypervisor, open);
    assert_eq!(world.stop(), End::Stopped);
    world.serve();
    write(&mut queue, 0, &pattern(1, 4096));
}

/// Its first channel cannot be bound, as on Linux when the process that was killed has not let go of it yet.
struct NotYet(Arc<Hypervisor>, AtomicBool);

impl EventChannels for NotYet {
    fn bind(&self, domain: DomId, port: Port) -> Result<Channel> {
        match self.1.swap(true, Ordering::AcqRel) {
            false => Err(Error::io("bind a channel", rustix::io::Errno::INVAL.into())),
            true => self.0.bind(domain, port),
        }
    }
}

#[test]
fn a_channel_that_is_not_free_yet_is_not_the_end_of_the_disk() {
    let mut world = Setup::new(Access::Copy).start();
    let (mut front, mut queue) = world.connect_one(BlkfrontOptions::default());
    write(&mut queue, 0, &pattern(1, 4096));
    world.stop();
    let hypervisor = Arc::new(Hypervisor::connect(world.dir.path()).unwrap());
    let path = world.host.xenstored();
    serve_by(&mut world, Arc::new(NotYet(hypervisor, AtomicBool::new(false))), move || XenStore::open(&path));
    wait_until("its end", || world.device().has_ended());
    assert!(world.device.take().unwrap().wait().is_err());
    assert!(world.run_file("journal").exists());
    assert_eq!(front.backend_state().unwrap(), 4);
    world.serve();
    assert_eq!(read(&mut queue, 0, 4096), pattern(1, 4096));
}
