//! The internal snapshots and the bitmaps of an image, for `info` and `check`. The disk can be read without them, so
//! damage to them is reported and stops nothing.

use spile_core::{Error, ErrorKind, Result, Store};

use super::codec::bitmap::Bitmap;
use super::codec::header::feature;
use super::codec::snapshot::{MAX_TABLE_BYTES, Snapshot};
use super::open::{Head, read};

/// The most that is read of a table when an image is opened.
const READ_BYTES: u64 = 64 << 10;

/// A list that may be damaged or longer than what was read.
#[derive(Clone, Debug)]
pub(super) struct List<T> {
    /// The entries that were read.
    pub entries: Vec<T>,
    /// How many there are, as the image says.
    pub count: u64,
    /// Why the list is shorter than that.
    pub fault: Option<String>,
}

impl<T> List<T> {
    fn empty() -> Self {
        Self { entries: Vec::new(), count: 0, fault: None }
    }
}

/// The lists of an image.
#[derive(Clone, Debug)]
pub(super) struct Lists {
    pub snapshots: List<Snapshot>,
    pub bitmaps: List<Bitmap>,
    /// The image says that its bitmaps are consistent.
    pub bitmaps_are_consistent: bool,
}

impl Lists {
    /// Reads the starts of both tables.
    pub(super) async fn read<S: Store>(store: &S, head: &Head) -> Self {
        Self {
            snapshots: snapshots(store, head, READ_BYTES).await,
            bitmaps: bitmaps(store, head, READ_BYTES).await,
            bitmaps_are_consistent: head.header.autoclear & feature::BITMAPS != 0,
        }
    }
}

/// All snapshots. Their table is read as far as it goes: nothing but its entries says how long it is.
pub(super) async fn all_snapshots<S: Store>(store: &S, head: &Head) -> List<Snapshot> {
    let mut most_bytes = READ_BYTES;
    loop {
        let list = snapshots(store, head, most_bytes).await;
        if list.fault.is_none() || most_bytes >= MAX_TABLE_BYTES {
            return list;
        }
        most_bytes *= 4;
    }
}

/// The snapshots in the first `most_bytes` of their table.
async fn snapshots<S: Store>(store: &S, head: &Head, most_bytes: u64) -> List<Snapshot> {
    let header = &head.header;
    let count = u64::from(header.snapshots);
    if count == 0 {
        return List::empty();
    }
    let table = match header.check_snapshots() {
        Ok(()) => table(store, header.snapshots_offset, most_bytes).await,
        Err(error) => Err(error.into()),
    };
    list(table, count, |bytes| {
        let (snapshot, len) = Snapshot::parse(bytes)?;
        snapshot.check(header.cluster_bits)?;
        Ok((snapshot, len))
    })
}

/// The bitmaps in the first `most_bytes` of their directory.
pub(super) async fn bitmaps<S: Store>(store: &S, head: &Head, most_bytes: u64) -> List<Bitmap> {
    let Some(place) = head.extensions.bitmaps else { return List::empty() };
    let table = table(store, place.directory_offset, most_bytes.min(place.directory_bytes)).await;
    list(table, u64::from(place.count), |bytes| {
        let (bitmap, len) = Bitmap::parse(bytes)?;
        bitmap.check(head.header.size_bytes, head.header.cluster_bits)?;
        Ok((bitmap, len))
    })
}

/// The bytes from `offset`, as far as the file goes.
async fn table<S: Store>(store: &S, offset: u64, most_bytes: u64) -> Result<Vec<u8>> {
    match store.len_bytes().checked_sub(offset) {
        None | Some(0) => {
            Err(Error::new(ErrorKind::Corrupt, "the table lies past the end of the file").at_offset(offset))
        }
        Some(rest) => read(store, offset, rest.min(most_bytes)).await,
    }
}

fn list<T>(table: Result<Vec<u8>>, count: u64, parse: impl Fn(&[u8]) -> Result<(T, usize)>) -> List<T> {
    let mut list = List { entries: Vec::new(), count, fault: None };
    let bytes = match table {
        Ok(bytes) => bytes,
        Err(error) => return List { fault: Some(error.to_string()), ..list },
    };
    let mut rest = &bytes[..];
    while (list.entries.len() as u64) < count {
        match parse(rest) {
            Ok((entry, len)) => {
                list.entries.push(entry);
                rest = rest.get(len..).unwrap_or_default();
            }
            Err(error) => return List { fault: Some(error.to_string()), ..list },
        }
    }
    list
}
