//! New sizes of disks while they are served.
//!
//! The main loop claims the disk; a task on a worker makes it longer, and waits for its storage where need be. So a server one of whose disks hangs still
//! answers its callers and hears signals. The end comes back to the main loop as an event, which tells guests and the caller.

use spile_core::{Disk, Result};

use super::api::Call;
use super::claims::Claim;
use super::control::{Event, LineRequest};
use super::jobs::Held;
use super::server::Server;

/// Who wants a new size, and waits for the answer.
pub(super) enum Caller {
    /// A call of the control API.
    Call(Call),
    /// A line on the control socket.
    Line(LineRequest),
}

/// A disk that has got its new size, or not.
pub struct Resized {
    name: String,
    done: Result<()>,
    caller: Caller,
    /// Nothing else changes its images meanwhile.
    claim: (Held, Claim),
}

impl Caller {
    fn answer(self, done: Result<()>) {
        match self {
            Self::Call(call) => call.answer(done),
            Self::Line(line) => line.answer(&done),
        }
    }
}

impl Server {
    /// Begins to give a disk a new size. The caller is answered when that has ended.
    pub(super) fn begin_resize(&self, name: Result<String>, size_bytes: u64, caller: Caller) {
        let begun = name.and_then(|name| {
            let open = self.named(&name)?;
            let held = open.jobs.hold_for_resize()?;
            let claim = self.claims.take(std::slice::from_ref(&name), "a resize")?;
            Ok((name, open.disk.clone(), (held, claim)))
        });
        let (name, disk, claim) = match begun {
            Ok(begun) => begun,
            Err(error) => return caller.answer(Err(error)),
        };
        let events = self.sender.clone();
        self.engine.spawn_on(0, move || async move {
            let done = disk.resize(size_bytes).await;
            // A server that ends closes the disk, and must find no share of it here.
            drop(disk);
            let _ = events.send(Event::Resized(Resized { name, done, caller, claim }));
        });
    }

    /// Tells guests and the caller of the end of a resize.
    pub(super) fn end_resize(&self, resized: Resized) {
        let Resized { name, done, caller, claim } = resized;
        if let (Ok(()), Ok(open)) = (&done, self.named(&name)) {
            self.fronts.tell_resized(open);
        }
        drop(claim);
        self.show();
        caller.answer(done);
    }
}
