//! Executes requests on the disk, and turns the disk's results into the status bytes of virtio-blk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{
    Disk, Error, ErrorKind, Extent, GuestOffset, Io, MAX_REQUEST_BYTES, Op, Result, SECTOR_BYTES, Segments, WriteZeroes,
};

use spile_front::{FailedRequest, LogLimit, WireStatus, log_failure, virtio};

use crate::config::{MAX_DISCARD_SECTORS, MAX_DISCARD_SEGMENTS, max_zeroes};
use crate::request::{Command, Request};

/// The front's name in the log.
pub const FRONT: &str = "vhost-user";
/// The bytes of an answer to GET_ID.
pub const ID_BYTES: usize = 20;
/// The bytes of one range of a discard: first sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;
const MAY_UNMAP: u32 = 1;

/// What a request comes to.
enum Work<'a> {
    /// One request of the disk.
    Io(Io<'a>),
    /// The disk's serial number.
    Id,
    /// A discard, or a write of zeroes, of each range that the data list.
    Ranges { zeroes: bool },
}

/// The disk with what the requests of one connection need.
pub struct Target<D> {
    /// The disk.
    pub disk: D,
    /// The disk's name in messages.
    pub name: String,
    /// What GET_ID answers, padded with zeroes.
    pub id: [u8; ID_BYTES],
    /// Refuse writes.
    pub read_only: bool,
    /// True when every write has to be durable before it is answered, because the driver cannot or does not want to
    /// flush.
    pub is_write_through: AtomicBool,
    /// Limits messages about failed requests.
    pub failures: Arc<LogLimit>,
}

impl<D: Disk> Target<D> {
    /// Does what the request asks for. Returns its status byte, and how many bytes of data the driver finds written; `None` when
    /// the disk has left the request undone because the server ends. Such a request gets no answer: the next server does it.
    pub async fn execute(&self, request: &Request) -> Option<(u8, u32)> {
        let result = match self.work(request) {
            Ok(Work::Io(io)) => self.disk.execute(io).await.map(|()| if io.op == Op::Read { len(request) } else { 0 }),
            Ok(Work::Id) => self.id(&request.data),
            Ok(Work::Ranges { zeroes }) => self.for_each_range(&request.data, zeroes).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(written) => Some((virtio::OK, written)),
            Err(error) if error.kind() == ErrorKind::Shutdown => None,
            Err(error) => {
                self.log_failure(request, &error);
                Some((WireStatus::of(error.kind()).virtio, 0))
            }
        }
    }

    fn work<'a>(&self, request: &'a Request) -> Result<Work<'a>> {
        if !request.is_sound {
            return refuse("the header or data lie outside the guest's memory");
        }
        Ok(match request.command {
            Command::Read => Work::Io(Io::read(extent(request)?, &request.data)),
            Command::Write => {
                self.check_writable()?;
                Work::Io(Io::write(extent(request)?, &request.data, self.is_write_through()))
            }
            Command::Flush => Work::Io(Io::flush()),
            Command::GetId => Work::Id,
            Command::Discard => Work::Ranges { zeroes: false },
            Command::WriteZeroes => Work::Ranges { zeroes: true },
            Command::Unknown(number) => {
                return Err(Error::new(ErrorKind::Unsupported, format!("there is no request of type {number}")));
            }
        })
    }

    fn is_write_through(&self) -> bool {
        self.is_write_through.load(Ordering::Relaxed)
    }

    fn check_writable(&self) -> Result<()> {
        match self.read_only {
            true => Err(Error::new(ErrorKind::ReadOnly, "the disk is served read-only")),
            false => Ok(()),
        }
    }

    fn id(&self, data: &Segments) -> Result<u32> {
        let len = data.len().min(ID_BYTES);
        data.copy_from_slice(0, &self.id[..len]);
        Ok(len as u32)
    }

    /// Discards or zeroes each range that `data` lists (section 5.2.6.2).
    async fn for_each_range(&self, data: &Segments, zeroes: bool) -> Result<u32> {
        self.check_writable()?;
        let info = self.disk.info();
        let discards = (MAX_DISCARD_SEGMENTS, MAX_DISCARD_SECTORS);
        let (max_ranges, max_sectors) = if zeroes { max_zeroes(&info) } else { discards };
        let count = data.len() / RANGE_BYTES;
        if !data.len().is_multiple_of(RANGE_BYTES) || !(1..=max_ranges as usize).contains(&count) {
            return refuse("the list of ranges has an odd length, or too many");
        }
        // All ranges are copied and checked before the first is done: the guest cannot change them any more.
        let mut bytes = [0; RANGE_BYTES * MAX_DISCARD_SEGMENTS as usize];
        let bytes = &mut bytes[..data.len()];
        data.copy_to_slice(0, bytes);
        let (ranges, _) = bytes.as_chunks::<RANGE_BYTES>();
        for range in ranges {
            range_of(range, zeroes, max_sectors, info.size_bytes)?;
        }
        for range in ranges {
            let (extent, may_unmap) = range_of(range, zeroes, max_sectors, info.size_bytes)?;
            match zeroes {
                true => self.disk.write_zeroes(extent, WriteZeroes { may_unmap, only_if_fast: false }).await?,
                false => self.disk.discard(extent).await?,
            }
        }
        if self.is_write_through() {
            self.disk.flush().await?;
        }
        Ok(0)
    }

    fn log_failure(&self, request: &Request, error: &Error) {
        let failed = FailedRequest {
            front: FRONT,
            disk: &self.name,
            command: &request.command,
            offset_bytes: request.offset.map(|offset| offset.0),
            len_bytes: request.data.len() as u64,
            outcome: "failed",
            reason: error,
        };
        log_failure(&self.failures, &failed);
    }
}

fn refuse<T>(what: &str) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, what))
}

/// The length of a request's data; it is within [`MAX_REQUEST_BYTES`].
fn len(request: &Request) -> u32 {
    request.data.len() as u32
}

/// The extent of a read or write.
fn extent(request: &Request) -> Result<Extent> {
    let len_bytes = request.data.len() as u64;
    let end = request.offset.and_then(|offset| offset.0.checked_add(len_bytes));
    match request.offset.zip(end) {
        Some((offset, _)) if len_bytes.is_multiple_of(SECTOR_BYTES) && len_bytes <= MAX_REQUEST_BYTES => {
            Ok(Extent { offset, len_bytes })
        }
        _ => refuse("offset or length are not whole sectors, or too large"),
    }
}

/// Decodes and checks one range of a discard or write of zeroes. Returns its extent, and whether its space may be
/// freed.
fn range_of(bytes: &[u8; RANGE_BYTES], zeroes: bool, max_sectors: u32, size_bytes: u64) -> Result<(Extent, bool)> {
    let (sector, rest) = bytes.split_first_chunk().expect("16 bytes hold 8");
    let (sectors, flags) = rest.split_first_chunk().expect("8 bytes hold 4");
    let (sector, sectors) = (u64::from_le_bytes(*sector), u32::from_le_bytes(*sectors));
    let flags = u32::from_le_bytes(flags.try_into().expect("4 bytes are left"));
    if flags & !(if zeroes { MAY_UNMAP } else { 0 }) != 0 {
        return Err(Error::new(ErrorKind::Unsupported, format!("a range with flags {flags:#x}")));
    }
    let len_bytes = u64::from(sectors) * SECTOR_BYTES;
    let offset = sector.checked_mul(SECTOR_BYTES);
    let fits = |offset: &u64| offset.checked_add(len_bytes).is_some_and(|end| end <= size_bytes);
    match offset.filter(fits) {
        Some(offset) if sectors <= max_sectors => {
            Ok((Extent { offset: GuestOffset(offset), len_bytes }, flags & MAY_UNMAP != 0))
        }
        _ => Err(Error::new(
            ErrorKind::OutOfRange,
            format!("sectors {sector} + {sectors} are too many, or not in the disk"),
        )),
    }
}
