//! Toy disks: a right one of each kind, and ones with a planted bug each, to prove the simulator before it proves others.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Files, Io, Op, OpenMode, Result,
    Segments, Store, StoreOffset, Via,
};

use crate::store::SimStore;
use crate::subject::Subject;
use crate::world::World;

const PATH: &str = "/toy";
const TABLE_BYTES: u64 = 4096;
const BLOCK_BYTES: u64 = 64 << 10;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// None: the disk is right.
    None,
    /// A write is answered before it is sent; it goes out with the next request.
    AnswersFirst,
    /// A flush does nothing.
    FlushWithoutSync,
    /// A write with FUA is not synced.
    FuaWithoutSync,
    /// The table of a thin disk is kept in memory until the flush.
    TableInMemory,
    /// No bug where blocks are never used again: the table entry is written before the data.
    EntryBeforeData,
    /// A block that a crash left without its entry is used again, with what lies in it.
    ReusesLeakedBlocks,
    /// The last sector of long writes goes missing when two writes are in flight.
    DropsConcurrent,
    /// A discard is remembered in memory only.
    DiscardInMemory,
}

/// Toy disks as a subject.
#[derive(Clone, Debug)]
pub struct Toy {
    /// The size of the disk in bytes, a multiple of 64 KiB.
    pub size_bytes: u64,
    /// Blocks are allocated on first write.
    pub thin: bool,
    /// What is wrong with it.
    pub bug: Bug,
}

/// An open toy disk.
pub struct ToyDisk {
    toy: Toy,
    store: SimStore,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Block numbers in the file, from 1; 0 is none. With whether the entry has been written.
    table: Vec<(u32, bool)>,
    blocks: u32,
    stash: Option<(u64, Vec<u8>)>,
    in_flight: usize,
    discarded: Vec<Extent>,
}

impl Subject for Toy {
    type Disk = ToyDisk;

    fn path(&self, _layer: usize) -> PathBuf {
        PathBuf::from(PATH)
    }

    async fn create(&self, world: &World, _layer: usize) -> Result<()> {
        let len = if self.thin { TABLE_BYTES } else { self.size_bytes };
        world.files().create(Path::new(PATH), len).map(drop)
    }

    async fn open(&self, world: &World, _layer: usize) -> Result<ToyDisk> {
        let store = world.files().open(&Path::new(PATH).into(), OpenMode::ReadWrite).await?;
        let mut state = State::default();
        if self.thin {
            let table = Segments::zeroed(TABLE_BYTES as usize);
            store.read_at(StoreOffset(0), &table, Via::Cached).await?;
            let blocks = (self.size_bytes / BLOCK_BYTES) as usize;
            state.table = table.to_vec().chunks_exact(4).take(blocks).map(entry).collect();
            state.blocks = state.table.iter().map(|(block, _)| *block).max().unwrap_or(0);
            if self.bug != Bug::ReusesLeakedBlocks {
                // What lies past the last known block may hold the bytes of a write that a crash cut short.
                let in_file = (store.len_bytes() - TABLE_BYTES).div_ceil(BLOCK_BYTES) as u32;
                state.blocks = state.blocks.max(in_file);
            }
        }
        Ok(ToyDisk { toy: self.clone(), store, state: Mutex::new(state) })
    }

    async fn check(&self, world: &World, _clean: bool) -> Result<(), String> {
        let view = world.view(Path::new(PATH)).ok_or("the file is gone")?;
        let mut table = vec![0; if self.thin { TABLE_BYTES as usize } else { 0 }];
        view.read(0, &mut table);
        let mut used: Vec<u32> = table.chunks_exact(4).map(|b| entry(b).0).filter(|block| *block > 0).collect();
        used.sort_unstable();
        let twice = used.windows(2).find(|pair| pair[0] == pair[1]);
        twice.map_or(Ok(()), |pair| Err(format!("block {} is used twice", pair[0])))
    }
}

fn entry(bytes: &[u8]) -> (u32, bool) {
    (u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), true)
}

impl ToyDisk {
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Where the piece of `extent` in its first block lies in the file, and its length; allocates for a write.
    fn place(&self, at: u64, end: u64, allocate: bool) -> (Option<u64>, u64) {
        if !self.toy.thin {
            return (Some(at), end - at);
        }
        let (block, within) = ((at / BLOCK_BYTES) as usize, at % BLOCK_BYTES);
        let len = (end - at).min(BLOCK_BYTES - within);
        let found = self.with(|state| {
            if state.table[block].0 == 0 && allocate {
                state.blocks += 1;
                state.table[block] = (state.blocks, false);
            }
            state.table[block].0
        });
        let start = TABLE_BYTES + u64::from(found.wrapping_sub(1)) * BLOCK_BYTES + within;
        ((found > 0).then_some(start), len)
    }

    async fn write_entry(&self, block: usize) -> Result<()> {
        if !self.toy.thin {
            return Ok(());
        }
        let (value, written) = self.with(|state| state.table[block]);
        if written {
            return Ok(());
        }
        let bytes = Segments::copied(&value.to_le_bytes());
        self.store.write_at(StoreOffset(block as u64 * 4), &bytes, Via::Cached).await?;
        self.with(|state| state.table[block].1 = true);
        Ok(())
    }

    async fn write_entries(&self) -> Result<()> {
        for block in 0..self.with(|state| state.table.len()) {
            if self.with(|state| state.table[block].0 > 0) {
                self.write_entry(block).await?;
            }
        }
        Ok(())
    }

    async fn put(&self, start: u64, bytes: &Segments) -> Result<()> {
        let (mut at, end) = (start, start + bytes.len() as u64);
        while at < end {
            let (place, len) = self.place(at, end, true);
            let block = (at / BLOCK_BYTES) as usize;
            if self.toy.bug == Bug::EntryBeforeData {
                self.write_entry(block).await?;
            }
            let part = bytes.slice((at - start) as usize..(at - start + len) as usize);
            self.store.write_at(StoreOffset(place.unwrap_or(0)), &part, Via::Direct).await?;
            if self.toy.bug != Bug::TableInMemory {
                self.write_entry(block).await?;
            }
            at += len;
        }
        Ok(())
    }

    async fn send_stash(&self) -> Result<()> {
        if let Some((at, bytes)) = self.with(|state| state.stash.take()) {
            self.put(at, &Segments::copied(&bytes)).await?;
        }
        Ok(())
    }

    async fn write_with_bug(&self, extent: Extent, from: &Segments) -> Result<()> {
        if self.toy.bug == Bug::AnswersFirst {
            self.send_stash().await?;
            self.with(|state| state.stash = Some((extent.start(), from.to_vec())));
            return Ok(());
        }
        let others = self.with(|state| {
            state.in_flight += 1;
            state.in_flight - 1
        });
        let drops = self.toy.bug == Bug::DropsConcurrent && others > 2 && from.len() > 4096;
        let sent = if drops { from.slice(0..from.len() - 512) } else { from.clone() };
        let done = self.put(extent.start(), &sent).await;
        self.with(|state| state.in_flight -= 1);
        done
    }

    async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.send_stash().await?;
        let mut at = extent.start();
        while at < extent.end() {
            let (place, len) = self.place(at, extent.end(), false);
            let start = (at - extent.start()) as usize;
            let part = into.slice(start..start + len as usize);
            match place {
                // A block at the end of the file may be there only in part after a power cut.
                Some(place) if place + len <= self.store.len_bytes() => {
                    self.store.read_at(StoreOffset(place), &part, Via::Direct).await?;
                }
                Some(place) if place < self.store.len_bytes() => {
                    part.fill(0);
                    let have = (self.store.len_bytes() - place) as usize & !511;
                    let have = part.slice(0..have);
                    self.store.read_at(StoreOffset(place), &have, Via::Cached).await?;
                }
                _ => part.fill(0),
            }
            at += len;
        }
        let gone = self.with(|state| state.discarded.clone());
        if gone.iter().any(|e| e.start() <= extent.start() && extent.end() <= e.end()) {
            into.fill(0);
        }
        Ok(())
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.with(|state| state.discarded.retain(|gone| !gone.overlaps(&extent)));
        self.write_with_bug(extent, from).await?;
        if fua && self.toy.bug != Bug::FuaWithoutSync { self.flush_all().await } else { Ok(()) }
    }

    async fn flush_all(&self) -> Result<()> {
        self.send_stash().await?;
        self.write_entries().await?;
        if self.toy.bug == Bug::FlushWithoutSync { Ok(()) } else { self.store.sync().await }
    }

    fn discard_extent(&self, extent: Extent) {
        if self.toy.bug == Bug::DiscardInMemory {
            self.with(|state| state.discarded.push(extent));
        }
    }
}

impl Disk for ToyDisk {
    fn info(&self) -> DiskInfo {
        let align = self.store.info().offset_align_bytes;
        DiskInfo {
            size_bytes: self.toy.size_bytes,
            request_align_bytes: align,
            memory_align_bytes: align,
            preferred_bytes: 4096,
            discard_align_bytes: align,
            read_only: false,
            fast_zero: false,
        }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.flush_all().await,
            Op::Discard => {
                self.discard_extent(io.extent);
                Ok(())
            }
            Op::WriteZeroes(_) => {
                let zeroes = Segments::zeroed(io.extent.len_bytes as usize);
                self.write_extent(io.extent, &zeroes, false).await
            }
        }
    }

    async fn extents(&self, extent: Extent, _max_runs: usize) -> Result<Vec<ExtentStatus>> {
        Ok(vec![ExtentStatus { extent, kind: ExtentKind::Data, depth: 0 }])
    }

    async fn resize(&self, _size_bytes: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "a toy keeps its size"))
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        self.flush_all().await
    }
}
