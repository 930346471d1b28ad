//! The sides of `shape`: the bare store, and a disk for each shape that a guest reaches by vhost-user.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Result, Store};
use spile_engine::Engine;
use spile_front_vhost::{Config, Server};
use spile_image::Graph;
use spile_node::Node;
use spile_server::listen::{Bound, Published};
use spile_server::uri::{Address, Target};

use super::{Parameters, Side};
use crate::experiments::Direction;
use crate::experiments::engine_transfer::{Transfers, transfer};
use crate::load;
use crate::slow::SlowStore;

/// All sides over stores of one kind.
pub struct Sides {
    engine: Engine,
    bare: Arc<SlowStore>,
    guests: Vec<(Side, Guest)>,
}

/// A disk with its server.
struct Guest {
    server: Server<Node<Graph<SlowStore>>>,
    socket: PathBuf,
    _name: Option<Published>,
}

impl Guest {
    fn new(engine: &Engine, socket: PathBuf, store: SlowStore, shape: spile_node::Shape) -> Result<Self> {
        let buffers = |len| spile_engine::pool().try_alloc(len).map(Into::into);
        let disk = Arc::new(Node::with_buffers(Graph::from_raw_store(store, true), buffers));
        let shaped = disk.clone();
        engine.run_on(0, move || async move { shaped.set_shape(shape).await })?;
        let server = Server::new(engine.clone(), disk, Config { read_only: true, queues: 1, ..Config::default() })?;
        let (fd, published) = Bound::new(&Address::Unix(socket.clone()))?.publish()?;
        server.listen(fd)?;
        Ok(Self { server, socket, _name: published })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.server.stop();
        self.server.wait_drained();
    }
}

impl Sides {
    /// All sides, each with a store of its own that `open` opens.
    ///
    /// # Errors
    /// Those of `open`; when a server does not start.
    pub fn new(
        engine: &Engine,
        folder: &Path,
        parameters: &Parameters,
        mut open: impl FnMut() -> Result<SlowStore>,
    ) -> Result<Self> {
        let guests = [Side::Off, Side::Split, Side::Auto].into_iter().map(|side| {
            let socket = folder.join(format!("shape-{side:?}"));
            Ok((side, Guest::new(engine, socket, open()?, side.shape(parameters.part_bytes))?))
        });
        let guests = guests.collect::<Result<_>>()?;
        Ok(Self { engine: engine.clone(), bare: Arc::new(open()?), guests })
    }

    /// Has the side that learns meet reads of this size for so long.
    ///
    /// # Errors
    /// When a read fails.
    pub fn learn(&self, request_bytes: u64, time: Duration) -> Result<()> {
        self.read(Side::Auto, request_bytes, time, 0).map(drop)
    }

    /// Reads at random places, one request after the other, for so long. Returns the bytes each second.
    ///
    /// # Errors
    /// When a read fails.
    pub fn read(&self, side: Side, request_bytes: u64, time: Duration, seed: u64) -> Result<f64> {
        match self.guests.iter().find(|(other, _)| *other == side) {
            None => self.read_bare(request_bytes, time, seed),
            Some((_, guest)) => {
                let options = load::Options {
                    block_bytes: request_bytes as u32,
                    depth: 1,
                    runtime: Some(time),
                    seed,
                    ..load::Options::new(Target::Vhost(guest.socket.clone()))
                };
                Ok(load::measure(&options)?.bytes_per_s)
            }
        }
    }

    fn read_bare(&self, block_bytes: u64, runtime: Duration, seed: u64) -> Result<f64> {
        let span_bytes = self.bare.len_bytes();
        let transfers = Transfers { direction: Direction::Read, block_bytes, depth: 1, runtime, span_bytes, seed };
        Ok(transfer(&self.engine, &self.bare, transfers)?.bytes_per_s())
    }
}
