//! A ring's table of registered files. For a file in the table the kernel needs no look-up for each request, and the
//! ring keeps it open until the last of its requests has ended.

use std::io;
use std::sync::Arc;

use io_uring::IoUring;

use crate::fd::{Fd, TABLE_FILES};
use crate::shared::WorkerLink;

/// The table of registered files of one ring: the identity ([`Fd::id`]) of the file at each index.
pub(crate) struct FileTable {
    pub(crate) ids: Vec<u64>,
    /// False after the kernel has refused a file once. Files are then used without being registered.
    pub(crate) usable: bool,
}

/// How an entry names its file.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// By its index in the table.
    Fixed(u32),
    /// By its descriptor.
    Plain(i32),
}

impl FileTable {
    /// A table with room for as many files as the process may have open, [`TABLE_FILES`] at most.
    ///
    /// # Errors
    /// The kernel's error. There is no ring without a table: when the process is killed, its files would be closed, and
    /// their locks would end, while requests of the ring are still at work.
    pub(crate) fn register(ring: &IoUring) -> io::Result<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let len = limit.unwrap_or(u64::MAX).min(TABLE_FILES.into()) as u32;
        if ring.submitter().register_files_sparse(len).is_err() {
            // Linux before 5.19 cannot make an empty table.
            Self::register_empty(ring, len)?;
        }
        Ok(Self { ids: vec![0; len as usize], usable: true })
    }

    pub(crate) fn register_empty(ring: &IoUring, len: u32) -> io::Result<()> {
        ring.submitter().register_files(&vec![-1; len as usize])
    }

    /// How an entry names the file. A file that is not in the table is put there first, if that is possible.
    pub(crate) fn target(&mut self, ring: &IoUring, shared: &Arc<WorkerLink>, fd: &Fd) -> Target {
        let Some(index) = fd.table_index else { return Target::Plain(fd.raw()) };
        match self.ids.get(index as usize) {
            Some(id) if *id == fd.id => Target::Fixed(index),
            Some(_) if self.usable => self.put_new(ring, shared, fd, index),
            _ => Target::Plain(fd.raw()),
        }
    }

    fn put_new(&mut self, ring: &IoUring, shared: &Arc<WorkerLink>, fd: &Fd, index: u32) -> Target {
        if !self.put(ring, index, fd.id, fd.raw()) {
            return Target::Plain(fd.raw());
        }
        fd.known_to(shared);
        Target::Fixed(index)
    }

    /// Registers a file at `index`. False when the ring cannot register files.
    pub(crate) fn put(&mut self, ring: &IoUring, index: u32, id: u64, fd: i32) -> bool {
        let Some(entry) = self.ids.get_mut(index as usize) else { return false };
        self.usable = self.usable && ring.submitter().register_files_update(index, &[fd]).is_ok();
        if self.usable {
            *entry = id;
        }
        self.usable
    }

    /// Removes the file from the index, unless another file is there by now.
    pub(crate) fn forget(&mut self, ring: &IoUring, id: u64, index: u32) {
        let Some(entry) = self.ids.get_mut(index as usize) else { return };
        if *entry == id {
            *entry = 0;
            // This fails only when there is no memory, and then the file stays open until the worker ends.
            let _ = ring.submitter().register_files_update(index, &[-1]);
        }
    }
}
