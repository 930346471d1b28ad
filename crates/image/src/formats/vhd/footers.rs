//! Which of an image's two footers counts.
//!
//! The footer lies at the end of the file. A dynamic or differencing image has a copy of it at its start.
//!
//! | footer at the end | copy at the start | what counts |
//! |---|---|---|
//! | valid, of a fixed disk | anything | the footer: the bytes at the start are the guest's |
//! | valid | the same, or torn | the footer |
//! | torn or missing | valid, not of a fixed disk | the copy |
//! | valid | valid, another | in a file, the footer if the image fits it, else the copy if it fits that; on a device the copy first; else neither |
//! | torn or missing | torn | neither |
//!
//! The image fits a footer when header and BAT are where the footer says, the BAT has an entry for each block of that
//! size, and all blocks lie in the file, behind each other, clear of all metadata and of that footer.
//!
//! **A guest may have written what looks like a footer.** A program that overwrites the footer with a block and is killed
//! then leaves a file that ends with a guest's bytes. So a footer at the end does not count when a block of the image that the
//! copy describes lies over it. For the footer of a fixed disk that case has no answer, for the guest of a fixed disk
//! can write what looks like a copy as well: such a file is refused.
//!
//! **A device may end with what was left there.** A volume that was made longer ends with anything: with the footer of a volume that was
//! deleted, or with an older one of the same image, after the volume was made shorter once. Images of one kind fit each other's footers, and a
//! smaller size always fits. So on a device the copy counts, if the image fits it, before a footer at the end that describes another disk. When that
//! footer is a fixed disk's, the device is refused: the guest of a fixed disk can write all that is at its start.
//!
//! A change of the size or the parent writes the footer at the end first, then the copy, and is acknowledged when both are durable (`resize`,
//! `grow`, `shrink`, `reparent`). Up to then the image fits either, so a crash in between leaves the old size or parent on a device.

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::bat::Bat;
use super::codec::footer::{DiskType, Footer};
use super::open::{check_blocks, check_size, corrupt, lay_out, load_bat, read_header};
use super::{Layout, SECTOR};

/// The footer that counts, and what is to be said of the other.
pub(super) struct Footers {
    pub footer: Footer,
    /// Bytes of the footer at the end: 512, 511 as Virtual PC before 2004 wrote it, or 0 where there is none.
    pub trailing_bytes: u64,
    /// True when the copy at the start counts.
    pub uses_copy: bool,
    /// The footer that does not count. [`Other::Agrees`] for a fixed disk, which has only one.
    pub other: Other,
}

/// How the footer that does not count compares to the one that does.
pub(super) enum Other {
    Agrees,
    /// It is missing, torn, or has a field that cannot be.
    Bad(Error),
    /// It is valid and says something else.
    Differs {
        what: String,
        /// It describes another disk: another type, identity, size or header.
        matters: bool,
    },
}

impl Footers {
    pub(super) fn has_trailing(&self) -> bool {
        self.trailing_bytes > 0
    }

    /// True when the copy must be written again before the footer at the end may go.
    pub(super) fn copy_is_bad(&self) -> bool {
        !self.uses_copy && !matches!(self.other, Other::Agrees)
    }

    /// True when the two describe different disks.
    pub(super) fn differ(&self) -> bool {
        matches!(self.other, Other::Differs { matters: true, .. })
    }

    /// What is wrong with the footer that does not count, in one sentence; `None` when both agree.
    pub(super) fn problem(&self) -> Option<String> {
        let other = if self.uses_copy { "the footer at the end" } else { "the footer's copy at the start" };
        match &self.other {
            Other::Agrees => None,
            Other::Bad(error) => Some(format!("{other} is missing or bad: {}", error.message())),
            Other::Differs { what, .. } => {
                let why = if self.uses_copy { ", which counts" } else { "" };
                let one = if self.uses_copy { "copy at the start" } else { "one at the end" };
                Some(format!("{other} differs from the {one}{why}: {what}"))
            }
        }
    }
}

/// Reads both footers and decides which one counts.
///
/// # Errors
/// `Corrupt` or `Unsupported` when neither can be used; I/O errors.
pub(super) async fn read_footers<S: Store>(store: &S) -> Result<Footers> {
    let len = store.len_bytes();
    if len < SECTOR {
        return Err(corrupt("the file is shorter than a VHD footer (512 bytes)"));
    }
    let mut trailing_bytes = SECTOR;
    let mut trailing = read_footer_at(store, len - SECTOR, SECTOR).await?;
    if trailing.is_err() && len % SECTOR == SECTOR - 1 {
        trailing_bytes = SECTOR - 1;
        trailing = read_footer_at(store, len - trailing_bytes, trailing_bytes).await?;
    }
    let copy = read_footer_at(store, 0, SECTOR).await?;
    let of_end = |footer, other| Footers { footer, trailing_bytes, uses_copy: false, other };
    match (trailing, copy) {
        (Ok(footer), copy) if footer.disk_type == DiskType::Fixed => {
            refuse_doubt(store, copy.ok(), len - trailing_bytes).await?;
            Ok(of_end(footer, Other::Agrees))
        }
        (Ok(footer), Ok(copy)) => choose(store, footer, trailing_bytes, copy).await,
        (Ok(footer), Err(error)) => Ok(of_end(footer, Other::Bad(error))),
        (Err(error), Ok(footer)) if footer.disk_type != DiskType::Fixed => {
            Ok(Footers { footer, trailing_bytes: 0, uses_copy: true, other: Other::Bad(error) })
        }
        (Err(error), _) => Err(error.hint(
            "neither a footer at the end nor a copy of it at the start can be used: \
             this is no VHD, or a fixed one whose end is cut off",
        )),
    }
}

/// A footer, for a look at what the image is: the one at the end of a file if it is valid, else the one that counts. A device may end with what
/// was left there.
pub(super) async fn any_footer<S: Store>(store: &S) -> Result<Footer> {
    let len = store.len_bytes();
    if store.info().grows_zeroed
        && len >= SECTOR
        && let Ok(footer) = read_footer_at(store, len - SECTOR, SECTOR).await?
    {
        return Ok(footer);
    }
    read_footers(store).await.map(|footers| footers.footer)
}

/// The inner error says what is wrong with the footer; the outer one that it could not be read.
async fn read_footer_at<S: Store>(store: &S, offset: u64, len: u64) -> Result<Result<Footer>> {
    let bytes = Segments::zeroed(len as usize);
    store.read_at(StoreOffset(offset), &bytes, Via::Cached).await?;
    Ok(Footer::parse(&bytes.to_vec()).map_err(|e| Error::from(e).at_offset(offset)))
}

/// Decides between two valid footers of a dynamic or differencing image.
async fn choose<S: Store>(store: &S, end: Footer, trailing_bytes: u64, copy: Footer) -> Result<Footers> {
    if disk_of(&end) == disk_of(&copy) {
        let other = match end == copy {
            true => Other::Agrees,
            false => Other::Differs { what: difference(&copy, &end), matters: false },
        };
        return Ok(Footers { footer: end, trailing_bytes, uses_copy: false, other });
    }
    let end_at = store.len_bytes() - trailing_bytes;
    let is_data = covers(store, &copy, end_at).await?;
    let why_not_end = match is_data {
        true => Some(corrupt("the footer at the end lies in a block")),
        false if is_device_of(store, &copy, end_at).await? => Some(left_behind()),
        false => misfit(store, &end, end_at).await?,
    };
    let Some(why_not_end) = why_not_end else {
        let other = Other::Differs { what: difference(&copy, &end), matters: true };
        return Ok(Footers { footer: end, trailing_bytes, uses_copy: false, other });
    };
    let copy_end = if is_data { store.len_bytes() } else { end_at };
    if copy.disk_type == DiskType::Fixed || misfit(store, &copy, copy_end).await?.is_some() {
        return Err(corrupt(format!(
            "the footer at the end and its copy at the start disagree, and the image fits neither: {}",
            difference(&copy, &end)
        ))
        .hint("the image may have been resized halfway")
        .caused_by(why_not_end));
    }
    let other = Other::Differs { what: difference(&end, &copy), matters: true };
    Ok(Footers { footer: copy, trailing_bytes: if is_data { 0 } else { trailing_bytes }, uses_copy: true, other })
}

/// True for a device on which the image fits the copy at its start: what looks like a footer at its end may have been left there.
async fn is_device_of<S: Store>(store: &S, copy: &Footer, end_at: u64) -> Result<bool> {
    Ok(!store.info().grows_zeroed && misfit(store, copy, end_at).await?.is_none())
}

fn left_behind() -> Error {
    corrupt("the footer at the end describes another disk, as what a volume that was made longer ends with may do")
}

/// Refuses a file that ends with the footer of a fixed disk, and begins as another image in which a block lies over that
/// footer. One of the two was written by a guest. Refuses a device, too, whose footer at the end may have been left by another image.
async fn refuse_doubt<S: Store>(store: &S, copy: Option<Footer>, end_at: u64) -> Result<()> {
    let Some(copy) = copy.filter(|copy| copy.disk_type != DiskType::Fixed) else { return Ok(()) };
    match covers(store, &copy, end_at).await? {
        false if is_device_of(store, &copy, end_at).await? => Err(corrupt(
            "the device begins as a dynamic VHD and ends as a fixed one, as a volume that was made longer may do",
        )
        .at_offset(end_at)
        .hint("if it was made longer, zero its last 512 bytes; if it is a fixed VHD, `spile convert --format raw` copies the bytes as they are")),
        false => Ok(()),
        true => Err(corrupt(
            "the file ends as a fixed VHD, and begins as another one in which the same bytes are a guest's data",
        )
        .hint("a guest may have written one of the two; `spile convert --format raw` copies the bytes as they are")),
    }
}

/// The fields that decide which disk it is and where its data lie.
fn disk_of(footer: &Footer) -> (DiskType, [u8; 16], u64, Option<u64>) {
    (footer.disk_type, footer.uuid, footer.current_size_bytes, footer.data_offset)
}

/// Why the image does not fit `footer`, which ends at or behind `end`; `None` when it does.
pub(super) async fn misfit<S: Store>(store: &S, footer: &Footer, end: u64) -> Result<Option<Error>> {
    let found = async {
        check_size(footer, store.len_bytes())?;
        let (layout, sectors) = view(store, footer).await?;
        check_blocks(end, &layout, &sectors)
    };
    match found.await {
        Ok(()) => Ok(None),
        Err(error) if is_content(&error) => Ok(Some(error)),
        Err(error) => Err(error),
    }
}

/// True when `footer` describes an image in which a block lies over the byte at `at`.
async fn covers<S: Store>(store: &S, footer: &Footer, at: u64) -> Result<bool> {
    match view(store, footer).await {
        Ok((layout, sectors)) => {
            Ok(sectors.iter().any(|&sector| (u64::from(sector) * SECTOR..layout.block_end(sector)).contains(&at)))
        }
        Err(error) if is_content(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The image that `footer` describes: its layout, and where its blocks lie, sorted.
async fn view<S: Store>(store: &S, footer: &Footer) -> Result<(Layout, Vec<u32>)> {
    let header = read_header(store, footer).await?;
    let (layout, _) = lay_out(store, footer, &header).await?;
    let bat = Bat::new(layout.blocks(), 0);
    let mut sectors = load_bat(store, &layout, &bat).await?;
    sectors.sort_unstable();
    Ok((layout, sectors))
}

/// True for an error of what the file says, and not of reading it.
fn is_content(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported)
}

/// What `other` says that `counts` does not.
fn difference(other: &Footer, counts: &Footer) -> String {
    let mut parts = Vec::new();
    let mut add = |what: &str, theirs: String, ours: String| {
        if theirs != ours {
            parts.push(format!("{what} {theirs}, not {ours}"));
        }
    };
    let hex = |uuid: &[u8; 16]| uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let offset = |footer: &Footer| footer.data_offset.map_or("none".to_owned(), |offset| offset.to_string());
    let chs = |footer: &Footer| format!("{:?}", footer.geometry);
    add("type", format!("{:?}", other.disk_type).to_lowercase(), format!("{:?}", counts.disk_type).to_lowercase());
    add("size", other.current_size_bytes.to_string(), counts.current_size_bytes.to_string());
    add("UUID", hex(&other.uuid), hex(&counts.uuid));
    add("header at", offset(other), offset(counts));
    add("time stamp", other.timestamp.to_string(), counts.timestamp.to_string());
    add("hidden", other.hidden.to_string(), counts.hidden.to_string());
    add("geometry", chs(other), chs(counts));
    if parts.is_empty() { "fields of the creator".to_owned() } else { parts.join("; ") }
}
