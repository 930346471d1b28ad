//! What a header says by now of an image that is in use: its size, its L1 table and its parent may change. All else stays as it was
//! when the image was opened.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::codec::header::Header;
use super::open::Head;

/// The head as the file has it now.
pub(super) struct Now {
    head: Mutex<Arc<Head>>,
    size_bytes: AtomicU64,
    has_parent: AtomicBool,
}

impl Now {
    pub fn new(head: Head) -> Self {
        let (size_bytes, has_parent) =
            (AtomicU64::new(head.header.size_bytes), AtomicBool::new(head.backing.is_some()));
        Self { head: Mutex::new(Arc::new(head)), size_bytes, has_parent }
    }

    pub fn head(&self) -> Arc<Head> {
        self.head.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    pub fn has_parent(&self) -> bool {
        self.has_parent.load(Ordering::Acquire)
    }

    fn change(&self, to: impl FnOnce(&mut Head)) {
        let mut held = self.head.lock().unwrap_or_else(|e| e.into_inner());
        let mut head = Head::clone(&held);
        to(&mut head);
        self.size_bytes.store(head.header.size_bytes, Ordering::Release);
        self.has_parent.store(head.backing.is_some(), Ordering::Release);
        *held = Arc::new(head);
    }

    /// The image has another size, and its L1 table lies where `header` says.
    pub fn set_size(&self, header: &Header) {
        self.change(|head| {
            head.header.size_bytes = header.size_bytes;
            head.header.l1_entries = header.l1_entries;
            head.header.l1_offset = header.l1_offset;
        });
    }

    /// The first cluster names other bitmaps: as `named` does.
    pub fn set_bitmaps(&self, named: Head) {
        self.change(|head| (head.extensions, head.used) = (named.extensions, named.used));
    }

    /// The image names another parent, or none: as `named` does.
    pub fn set_parent(&self, named: Head) {
        self.change(|head| {
            head.header.backing = named.header.backing;
            (head.extensions, head.backing, head.used) = (named.extensions, named.backing, named.used);
        });
    }
}
