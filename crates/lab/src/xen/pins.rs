//! Counts how often each grant of a domain is in use in this process, so that the end of one use does not end another.
//!
//! The counts are this process's own. Two processes that use the same grant at the same moment may clear the mark in the
//! table too early, which harms nobody but a guest that grants one page to two disks.

use spile_xen::{DomId, GrantRef, GrantStatus};

use super::table::{Table, flag};

/// A frame that is not in the guest's memory (GNTST_bad_page).
pub(crate) const BAD_PAGE: GrantStatus = GrantStatus(-9);

#[derive(Clone, Copy, Default)]
struct Pin {
    readers: u32,
    writers: u32,
    /// The frame of the grant. It cannot change while the grant is in use.
    frame: u32,
}

/// The counts of one domain.
pub(crate) struct Pins {
    table: Table,
    us: DomId,
    /// Frames in the domain's memory.
    frames: u32,
    pins: Vec<Pin>,
}

impl Pins {
    pub fn new(table: Table, us: DomId, frames: u32) -> Self {
        let pins = vec![Pin::default(); table.entries() as usize];
        Self { table, us, frames, pins }
    }

    /// Begins a use of a grant, and returns its frame.
    pub fn begin(&mut self, gref: GrantRef, is_write: bool) -> Result<u32, GrantStatus> {
        let pin = self.pins.get_mut(gref.0 as usize).ok_or(GrantStatus::BAD_GREF)?;
        let is_unused = pin.readers + pin.writers == 0;
        if is_unused || is_write && pin.writers == 0 {
            self.table.claim(gref, self.us, is_write)?;
        }
        if is_unused {
            pin.frame = self.table.frame(gref);
        }
        *(if is_write { &mut pin.writers } else { &mut pin.readers }) += 1;
        let frame = pin.frame;
        if frame < self.frames {
            return Ok(frame);
        }
        self.end(gref, is_write);
        Err(BAD_PAGE)
    }

    /// Ends a use that [`Pins::begin`] began.
    pub fn end(&mut self, gref: GrantRef, is_write: bool) {
        let pin = &mut self.pins[gref.0 as usize];
        *(if is_write { &mut pin.writers } else { &mut pin.readers }) -= 1;
        let mut clear = 0;
        if is_write && pin.writers == 0 {
            clear |= flag::WRITING;
        }
        if pin.readers + pin.writers == 0 {
            clear |= flag::READING;
        }
        if clear != 0 {
            self.table.clear(gref, clear);
        }
    }
}
