//! The front end's side of the handshake.

use std::time::{Duration, Instant};

use spile_lab::xen::{Gntalloc, UnboundPort, state};
use spile_xen::DomId;
use spile_xen::blkif::{Abi, op, status};
use spile_xen::store::{Tx, XenStore};

use crate::queue::Queue;

/// The domain of the back end.
pub const BACK_END: DomId = DomId(0);
/// For what has to come: all is slow in emulation.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// For what must not come, and for states that shall have come to rest.
pub const QUIET: Duration = Duration::from_millis(250);

/// A disk's front end.
pub struct Front {
    pub store: XenStore,
    pub gntalloc: Gntalloc,
    back: String,
    path: String,
    /// The back end keeps pages mapped.
    pub is_persistent: bool,
}

impl Front {
    /// Of the disk whose back end is there.
    pub fn open(back: &str) -> Self {
        let mut store = XenStore::open_default().expect("xenstore");
        let path = store.read_string(Tx::NONE, &format!("{back}/frontend")).expect("the front end's path");
        store.watch(&format!("{back}/state"), "back").expect("a watch");
        let gntalloc = Gntalloc::open().expect("grants");
        Self { store, gntalloc, back: back.into(), path, is_persistent: false }
    }

    /// A key of ours.
    pub fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.path)
    }

    fn back_key(&mut self, key: &str) -> u64 {
        let text = self.store.read_optional(Tx::NONE, &format!("{}/{key}", self.back)).expect("xenstore");
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// The back end's state.
    pub fn back_state(&mut self) -> u32 {
        self.back_key("state") as u32
    }

    /// The size of the disk.
    pub fn sectors(&mut self) -> u64 {
        self.back_key("sectors")
    }

    pub fn set_state(&mut self, state: u32) {
        let path = self.key("state");
        self.store.write(Tx::NONE, &path, &state.to_string()).expect("xenstore");
    }

    /// Waits until the back end is in one of these states; which.
    pub fn wait_for(&mut self, wanted: &[u32]) -> u32 {
        let begun = Instant::now();
        loop {
            let now = self.back_state();
            if wanted.contains(&now) {
                return now;
            }
            assert!(begun.elapsed() < PATIENCE, "the back end stays in state {now}; wanted {wanted:?}");
            self.store.next_event(Some(Duration::from_secs(1))).expect("xenstore");
        }
    }

    /// Waits until the back end has done all that we have asked it for.
    pub fn settle(&mut self) {
        let begun = Instant::now();
        while self.store.next_event(Some(QUIET)).expect("xenstore").is_some() {
            assert!(begun.elapsed() < PATIENCE, "the back end does not come to rest");
        }
    }

    /// Begins anew, whatever was before, until the back end makes its offer.
    pub fn begin(&mut self) {
        self.set_state(state::INITIALISING);
        self.wait_for(&[state::INIT_WAIT]);
        self.is_persistent = self.back_key("feature-persistent") == 1;
    }

    /// Ends the connection, and all that it used is ours again.
    pub fn end(&mut self) {
        self.set_state(state::CLOSED);
        self.wait_for(&[state::CLOSED]);
        self.begin();
    }

    /// Says where the queue is, in what is done at once; `changed` keys are others, or none.
    pub fn tell(&mut self, queue: &Queue, changed: &[(&str, Option<&str>)]) {
        let usual = [
            ("ring-ref", queue.ring_ref().0.to_string()),
            ("event-channel", queue.channel.port().0.to_string()),
            ("protocol", Abi::X86_64.name().into()),
            ("feature-persistent", u32::from(self.is_persistent).to_string()),
        ];
        self.remove_keys();
        for (key, value) in &usual {
            let path = self.key(key);
            self.store.write(Tx::NONE, &path, value).expect("xenstore");
        }
        for (key, value) in changed {
            let path = self.key(key);
            match value {
                Some(value) => self.store.write(Tx::NONE, &path, value),
                None => self.store.remove(Tx::NONE, &path),
            }
            .expect("xenstore");
        }
        self.set_state(state::INITIALISED);
    }

    /// All that an earlier connection may have left.
    fn remove_keys(&mut self) {
        let path = self.path.clone();
        for key in self.store.list(Tx::NONE, &path).expect("xenstore") {
            if key != "state" && !key.starts_with("backend") {
                self.store.remove(Tx::NONE, &format!("{path}/{key}")).expect("xenstore");
            }
        }
    }

    /// A queue that the back end was not told of.
    pub fn queue(&mut self) -> Queue {
        self.begin();
        Queue::new(&self.gntalloc, UnboundPort::new(BACK_END).expect("an event channel"))
    }

    /// What the back end was told is good.
    pub fn finish(&mut self) {
        let answer = self.wait_for(&[state::CONNECTED, state::CLOSING, state::CLOSED]);
        assert_eq!(answer, state::CONNECTED, "it is refused");
        self.set_state(state::CONNECTED);
    }

    /// A connection, as every driver makes it.
    pub fn connect(&mut self) -> Queue {
        let queue = self.queue();
        self.tell(&queue, &[]);
        self.finish();
        queue
    }

    /// The back end does not take these keys, and says so; afterwards it makes another offer.
    pub fn assert_refused(&mut self, changed: &[(&str, Option<&str>)]) {
        let queue = self.queue();
        self.assert_refuses(&queue, changed);
    }

    /// The same of a queue that is there.
    pub fn assert_refuses(&mut self, queue: &Queue, changed: &[(&str, Option<&str>)]) {
        self.tell(queue, changed);
        let answer = self.wait_for(&[state::CONNECTED, state::CLOSING, state::CLOSED]);
        assert_ne!(answer, state::CONNECTED, "{changed:?} is taken");
        self.end();
    }

    /// A new connection moves data, and finds them again.
    pub fn assert_well(&mut self) {
        let mut queue = self.connect();
        let sector = self.sectors() - 8 * 11;
        queue.fill(0x5a);
        assert_eq!(queue.ask(queue.plain(op::WRITE, 11, sector)), status::OKAY);
        assert_eq!(queue.ask(queue.plain(op::FLUSH_DISKCACHE, 0, 0)), status::OKAY);
        let written = queue.bytes(11);
        queue.data.bytes.fill(0);
        assert_eq!(queue.ask(queue.plain(op::READ, 11, sector)), status::OKAY);
        assert!(queue.bytes(11) == written, "other data are read than were written");
        self.end();
    }
}
