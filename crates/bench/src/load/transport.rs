//! What the pump needs of a way to a server, and what a way needs of the load.

use std::future::Future;
use std::time::Duration;

use spile_core::Result;

/// A request's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One block comes.
    Read,
    /// One block goes.
    Write,
    /// All answered writes become durable.
    Flush,
}

/// What the server said of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Flushes are served.
    pub flush: bool,
    /// A write can ask to be durable before its answer.
    pub fua: bool,
    /// Requests are multiples of this many bytes.
    pub min_block_bytes: u32,
    /// The most bytes of a request.
    pub max_block_bytes: u32,
}

/// What requests a transport will carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Requests in flight.
    pub depth: u32,
    /// Bytes of a read or a write.
    pub block_bytes: u32,
    /// Some requests will be writes.
    pub writes: bool,
    /// What reads bring will be looked at.
    pub keep_data: bool,
}

/// Connections to one server, before they are put under load.
pub trait Endpoint: Sized {
    /// One of them under load.
    type Ready: Ready;

    /// What the server said of the disk.
    fn info(&self) -> Info;

    /// Makes all connections ready, and hands them to `run`, which returns when they are not used any more. Also returns
    /// how often a connection was taken up again.
    ///
    /// # Errors
    /// When they cannot be made ready, and those of `run`.
    fn run<R>(self, shape: Shape, run: impl FnOnce(Vec<Self::Ready>) -> Result<R>) -> Result<(R, u32)>;
}

/// One connection that is ready for its load, on its way to the thread that drives it.
pub trait Ready: Send + 'static {
    /// The connection on that thread.
    type Transport: Transport;

    /// Runs `work` where the transport lives, and blocks the calling thread until its end.
    fn block_on<T, Fut>(self, work: impl FnOnce(Self::Transport) -> Fut + Send + 'static) -> T
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static;
}

/// One connection under load: slots that hold one request each. Slots are below the shape's depth.
pub trait Transport: 'static {
    /// Lets `fill` write the data of the slot's next write: one block.
    fn fill(&mut self, slot: usize, fill: impl FnOnce(&mut [u8]));

    /// Puts a request into a free slot; [`Transport::submit`] sends it.
    fn issue(&mut self, slot: usize, kind: Kind, offset_bytes: u64, fua: bool);

    /// Sends what was issued. Does not wait.
    fn submit(&mut self);

    /// Waits for answers, at most `timeout` if there is one, else until the server must be taken for stuck. True when
    /// there may be something to take.
    ///
    /// # Errors
    /// When the connection is lost, or the server did not answer for long.
    async fn wait(&mut self, timeout: Option<Duration>) -> Result<bool>;

    /// Waits for this long, with nothing in flight.
    async fn pause(&mut self, duration: Duration);

    /// Takes one answer and returns its slot, which is free again; `None` when there is none.
    ///
    /// # Errors
    /// When the server has refused the request or broken the protocol.
    fn take(&mut self) -> Result<Option<usize>>;

    /// The block that the read in `slot` has brought. Holds until the next call of another method.
    fn data(&mut self, slot: usize) -> &[u8];
}
