//! [`Find`]: exports that are not known before a client asks for them.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use spile_core::{Disk, Result};
use spile_front::Peer;

use crate::server::Server;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name of the export.
    pub export: String,
    /// The metadata contexts that it asks for with it.
    pub queries: Vec<String>,
    /// Who it is.
    pub peer: Peer,
}

/// Finds, or makes, exports that clients ask for by name.
pub trait Find<D: Disk>: Send + Sync {
    /// The export that is `wanted`. A client that has to use TLS has shown its certificate by then. It runs on the connection's worker, while the client waits, and may be called
    /// again for the same name.
    ///
    /// # Errors
    /// Why there is none: the client is told.
    fn find<'a>(&'a self, wanted: &'a Wanted) -> Pin<Box<dyn Future<Output = Result<Found<D>>> + 'a>>;
}

/// An export that was found.
pub struct Found<D: Disk> {
    /// A server that has it as its only one, whatever it calls it. It need not listen.
    pub server: Arc<Server<D>>,
    /// What the connection keeps until its end.
    pub lease: Box<dyn Any + Send + Sync>,
    /// Another connection of this client would not get the same.
    pub is_alone: bool,
}
