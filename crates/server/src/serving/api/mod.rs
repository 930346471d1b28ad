//! The control API: HTTP and JSON over the control socket.
//!
//! - [`types`], [`images`]: the bodies. [`view`]: what is served now, for callers that only look.
//! - [`routes`]: the paths, and the OpenAPI document that is made from them; [`jobs`]: those of jobs, which commands answer, too. [`http`]: connections and
//!   their bounds.
//! - [`stats`]: what was counted, exactly. [`rates`]: what lies between two answers of it. [`text`]: counts as lines for the log.
//! - `backups`: begins backups. [`workers`]: what has woken the server's threads up.
//! - [`client`]: the other side, for commands. [`discovery`]: control sockets in their folder. [`watch`]: all
//!   servers of a folder at once.
//!
//! The API runs on a thread of its own. What changes the server is a [`Order`] for its main thread, one after the other.

mod backups;
pub mod checkpoints;
pub mod client;
pub mod discovery;
mod failure;
pub mod http;
pub mod images;
pub mod jobs;
pub mod limits;
pub mod rates;
mod routes;
pub mod slow;
pub mod stats;
pub mod text;
pub mod trace;
pub mod types;
pub mod view;
pub mod watch;
pub mod workers;

use spile_core::Result;
use tokio::sync::oneshot;

use types::{Attach, NewExport};

pub use routes::{Context, document, refusal, router};

/// An order for a server's main thread.
#[derive(Clone, Debug)]
pub enum Order {
    /// Make the disk of this name longer.
    Resize {
        /// The disk.
        name: String,
        /// Its new size.
        size_bytes: u64,
    },
    /// Serve one more disk.
    Attach(Attach),
    /// Serve a disk no more.
    Detach {
        /// The disk.
        name: String,
        /// Also when guests or clients are connected to it.
        force: bool,
    },
    /// Listen on one more socket.
    AddExport(NewExport),
    /// Listen on a socket no more.
    RemoveExport {
        /// Its address.
        address: String,
    },
    /// End in order.
    Shutdown,
}

/// An order and the way to answer it.
pub struct Call {
    /// What to do.
    pub order: Order,
    reply: oneshot::Sender<Result<()>>,
}

impl Call {
    /// A call, and where its answer will come.
    pub fn new(order: Order) -> (Self, oneshot::Receiver<Result<()>>) {
        let (reply, answer) = oneshot::channel();
        (Self { order, reply }, answer)
    }

    /// Answers that the order is done, or why not.
    pub fn answer(self, done: Result<()>) {
        // A caller that has gone does not need the answer.
        let _ = self.reply.send(done);
    }
}
