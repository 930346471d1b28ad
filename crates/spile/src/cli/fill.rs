//! Converting into a new qcow2, which is written from its first cluster to its last: pieces are read ahead, looked through for
//! zeroes and, on all processors, compressed; they are written in order.

use std::future::{poll_fn, ready};
use std::io::{Read, stdin};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use futures_util::stream::{FuturesOrdered, StreamExt as _};
use spile_core::{Disk, Error, ErrorKind, Extent, Result, Segments, Store};
use spile_image::create::Compression;
use spile_image::formats::qcow2::codec::compress::compress;
use spile_image::formats::qcow2::fill::{Content, Filler};

use super::Progress;
use super::copy::{CHUNK_BYTES, Chunk, Chunks};

/// Pieces that are worked on at a time.
const AT_ONCE: usize = 16;
/// The most threads that compress.
const MAX_THREADS: usize = 16;

/// Clusters of a piece, by their numbers.
type Clusters = Vec<(u64, Content)>;
type Work<'a> = Pin<Box<dyn Future<Output = Result<Clusters>> + 'a>>;

/// A new image and what is on its way to it.
pub struct Feed<'a, S: Store> {
    filler: Filler<S>,
    threads: Option<Arc<Threads>>,
    work: FuturesOrdered<Work<'a>>,
    written_bytes: u64,
}

impl<'a, S: Store> Feed<'a, S> {
    /// Fills the image; compresses its clusters if `compresses`.
    pub fn new(filler: Filler<S>, compresses: bool) -> Self {
        let threads = compresses.then(|| Arc::new(Threads::start()));
        Self { filler, threads, work: FuturesOrdered::new(), written_bytes: 0 }
    }

    /// The length of a piece in bytes: a whole number of clusters.
    pub fn piece_bytes(&self) -> u64 {
        CHUNK_BYTES.max(self.filler.cluster_bytes())
    }

    /// Adds the piece at `start` of the disk, a piece's length of bytes, behind all that were added before. An error may come
    /// from an earlier piece.
    async fn add(&mut self, start: u64, bytes: impl Future<Output = Result<Segments>> + 'a) -> Result<()> {
        let (cluster, compression) = (self.filler.cluster_bytes(), self.filler.compression());
        let threads = self.threads.clone();
        self.work.push_back(Box::pin(async move {
            let clusters = clusters_of(start / cluster, cluster as usize, &bytes.await?);
            match threads {
                Some(threads) => Ok(threads.run(move || compressed(clusters, compression)).await),
                None => Ok(clusters.into_iter().map(|(number, bytes)| (number, Content::Plain(bytes))).collect()),
            }
        }));
        if self.work.len() >= AT_ONCE { self.write_next().await } else { Ok(()) }
    }

    async fn write_next(&mut self) -> Result<()> {
        let Some(clusters) = self.work.next().await else { return Ok(()) };
        for (number, content) in clusters? {
            self.written_bytes += self.filler.put(number, content).await?;
        }
        Ok(())
    }

    /// Writes what is on its way, and makes the image durable. Returns how many bytes of data were written.
    ///
    /// # Errors
    /// The disks'.
    pub async fn finish(mut self) -> Result<u64> {
        while !self.work.is_empty() {
            self.write_next().await?;
        }
        self.filler.finish().await?;
        Ok(self.written_bytes)
    }

    /// Adds all of `disk`.
    ///
    /// # Errors
    /// The disks'.
    pub async fn add_disk<D: Disk>(&mut self, disk: &'a D, bar: &Progress) -> Result<()> {
        let mut chunks = Chunks::new(disk, Extent::from_range(0..disk.info().size_bytes));
        let piece = self.piece_bytes();
        let mut runs: Vec<Extent> = Vec::new();
        loop {
            let next: Option<Chunk> = chunks.next().await?;
            let starts = next.as_ref().map(|chunk| chunk.extent.start() / piece);
            if let Some(first) = runs.first().map(|run| run.start() / piece)
                && starts != Some(first)
            {
                let runs = std::mem::take(&mut runs);
                bar.inc(runs.iter().map(|run| run.len_bytes).sum());
                self.add(first * piece, read_runs(disk, first * piece, piece, runs)).await?;
            }
            match next {
                None => return Ok(()),
                Some(chunk) if chunk.is_data => runs.push(chunk.extent),
                Some(_) => {}
            }
        }
    }

    /// Adds stdin, which has `size_bytes` at most.
    ///
    /// # Errors
    /// `NoSpace` when there are more bytes; the disk's.
    pub async fn add_stdin(&mut self, size_bytes: u64, bar: &Progress) -> Result<()> {
        let (mut at, piece) = (0, self.piece_bytes() as usize);
        loop {
            let mut buffer = Vec::new();
            let len = stdin().lock().take(piece as u64).read_to_end(&mut buffer);
            let len = len.map_err(|error| Error::io("cannot read from stdin", error))?;
            if len as u64 > size_bytes - at {
                let what = format!("stdin has more bytes than the disk, which has {size_bytes}");
                return Err(Error::new(ErrorKind::NoSpace, what).hint("say a larger --size"));
            }
            buffer.resize(piece, 0);
            self.add(at, ready(Ok(Segments::copied(&buffer)))).await?;
            at += len as u64;
            bar.inc(len as u64);
            if len < piece {
                return Ok(());
            }
        }
    }
}

/// Pieces from runs of bytes that come in order and end anywhere.
pub struct Gather {
    piece_bytes: u64,
    /// The piece that is being filled.
    piece: Option<(u64, Segments)>,
}

impl Gather {
    /// Gathers pieces for `feed`.
    pub fn new<S: Store>(feed: &Feed<'_, S>) -> Self {
        Self { piece_bytes: feed.piece_bytes(), piece: None }
    }

    /// Adds the bytes at `start`.
    ///
    /// # Errors
    /// The disk's.
    pub async fn add<S: Store>(&mut self, feed: &mut Feed<'_, S>, start: u64, bytes: &Segments) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = start + done as u64;
            let (number, within) = (at / self.piece_bytes, (at % self.piece_bytes) as usize);
            let len = (bytes.len() - done).min(self.piece_bytes as usize - within);
            if self.piece.as_ref().is_some_and(|(other, _)| *other != number) {
                self.finish(feed).await?;
            }
            let zeroed = || (number, Segments::zeroed(self.piece_bytes as usize));
            let (_, piece) = self.piece.get_or_insert_with(zeroed);
            piece.slice(within..within + len).copy_from(&bytes.slice(done..done + len));
            done += len;
        }
        Ok(())
    }

    /// Adds the last piece.
    ///
    /// # Errors
    /// The disk's.
    pub async fn finish<S: Store>(&mut self, feed: &mut Feed<'_, S>) -> Result<()> {
        match self.piece.take() {
            Some((number, bytes)) => feed.add(number * self.piece_bytes, ready(Ok(bytes))).await,
            None => Ok(()),
        }
    }
}

/// A piece whose runs are read, and which is zero elsewhere.
async fn read_runs(disk: &impl Disk, start: u64, len_bytes: u64, runs: Vec<Extent>) -> Result<Segments> {
    let bytes = Segments::zeroed(len_bytes as usize);
    for run in runs {
        let (from, to) = ((run.start() - start) as usize, (run.end() - start) as usize);
        disk.read(run, &bytes.slice(from..to)).await?;
    }
    Ok(bytes)
}

/// The clusters of a piece that hold something else than zeroes; the first one has the number `first`.
fn clusters_of(first: u64, cluster_bytes: usize, piece: &Segments) -> Vec<(u64, Segments)> {
    let clusters = (0..piece.len() / cluster_bytes).map(|n| piece.slice(n * cluster_bytes..(n + 1) * cluster_bytes));
    (first..).zip(clusters).filter(|(_, bytes)| !bytes.is_zero()).collect()
}

fn compressed(clusters: Vec<(u64, Segments)>, compression: Compression) -> Clusters {
    let one = |bytes: Segments| match compress(compression, &bytes.to_vec()) {
        Some(short) => Content::Compressed(short),
        None => Content::Plain(bytes),
    };
    clusters.into_iter().map(|(number, bytes)| (number, one(bytes))).collect()
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that compress. They end when this is dropped.
struct Threads {
    jobs: Sender<Job>,
}

struct Answer<T> {
    result: Option<T>,
    waker: Option<Waker>,
}

impl Threads {
    fn start() -> Self {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)) {
            let queue = queue.clone();
            std::thread::spawn(move || work(&queue));
        }
        Self { jobs }
    }

    async fn run<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let ours = Arc::new(Mutex::new(Answer { result: None, waker: None }));
        let theirs = ours.clone();
        let job = Box::new(move || {
            let result = call();
            let mut answer = theirs.lock().unwrap_or_else(PoisonError::into_inner);
            answer.result = Some(result);
            let waker = answer.waker.take();
            drop(answer);
            waker.into_iter().for_each(Waker::wake);
        });
        if let Err(unsent) = self.jobs.send(job) {
            // There is no thread left: one that could not be started, or that panicked.
            (unsent.0)();
        }
        poll_fn(|context| {
            let mut answer = ours.lock().unwrap_or_else(PoisonError::into_inner);
            match answer.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    answer.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
