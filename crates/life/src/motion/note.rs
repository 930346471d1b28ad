//! [`Moved`]: the note beside a disk that says where it was moved to ([`names::moved`]).
//!
//! It is written, durably, before the old image loses its name. While there is an image of that name, it says nothing.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, Segments, Store, StoreOffset, Via};

use super::{old_image, order};
use crate::jobs::note::{Note, is_there, read_text, text_of, text_of_place};
use crate::names;
use crate::snapshot::{remove_if_there, remove_own};

/// What the note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The disk's new place.
    pub to: Locator,
    /// The path that the old image got.
    pub image: PathBuf,
    /// The hidden name of the new image, if it is a file. Once the disk has its new path, the note says nothing of it any more.
    pub half: Option<PathBuf>,
    /// The order by which the other host gives the new image its name, if it takes disks in, and as long as it may not have done so.
    pub finish: Option<Locator>,
}

const HEAD: &str = "spile moved 1";
const END: &str = "end";

impl Moved {
    fn to_text(&self) -> Result<String> {
        let (to, image) = (text_of_place(&self.to)?, text_of(&self.image)?);
        let half = match &self.half {
            Some(half) => format!("half {}\n", text_of(half)?),
            None => String::new(),
        };
        let finish = match &self.finish {
            Some(finish) => format!("finish {}\n", text_of_place(finish)?),
            None => String::new(),
        };
        Ok(format!("{HEAD}\nto {to}\nimage {image}\n{half}{finish}{END}\n"))
    }

    /// What a note says with this text; `None` for one that was not written to its end.
    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines();
        lines.next().filter(|head| *head == HEAD)?;
        let mut next = |before: &str| lines.next()?.strip_prefix(before);
        let (to, image) = (next("to ")?.parse().ok()?, next("image ")?.into());
        let (mut half, mut finish) = (None, None);
        for line in lines {
            match (line.split_once(' ')?, &to) {
                (("half", path), Locator::Path(_)) => half = Some(PathBuf::from(path)),
                (("finish", order), Locator::Nbd(_)) => finish = Some(order.parse().ok()?),
                _ => return None,
            }
        }
        matches!(to, Locator::Path(_) | Locator::Nbd(_)).then_some(Self { to, image, half, finish })
    }

    /// Writes the note of `disk`, durably, in the place of an older one.
    ///
    /// # Errors
    /// As [`refuse_unfinished`]; the system's.
    pub(super) async fn write<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        refuse_unfinished(files, disk, Some(&self.to)).await?;
        let (text, new) = (self.to_text()?, names::new_moved(disk));
        remove_if_there(files, &new).await?;
        let store = files.create(&new, 0).await?;
        store.write_at(StoreOffset(0), &Segments::copied(text.as_bytes()), Via::Cached).await?;
        store.sync().await?;
        drop(store);
        files.rename(&new, &names::moved(disk)).await
    }

    /// Says in the note of `disk`, if it is this one, that the disk has its new path: nobody takes that back any more, or asks for it.
    pub(super) async fn write_done<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        match Self::read(files, disk).await? {
            Some(there) if there == *self && (self.half.is_some() || self.finish.is_some()) => {
                Self { half: None, finish: None, ..self.clone() }.write(files, disk).await
            }
            _ => Ok(()),
        }
    }

    /// The note of `disk`, if there is one that Spile has written for a disk of this name. Whoever may write in the folder can
    /// give such a file, or the note of another disk, this name.
    ///
    /// # Errors
    /// `InvalidInput` for a file that is longer than any note; the system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        Ok(read_text(files, &names::moved(disk)).await?.and_then(|text| Self::of_disk(&text, disk)))
    }

    /// What a note of the disk `disk` says with this text; `None` for one of another disk, and for one that was not written to its end.
    pub fn of_disk(text: &str, disk: &Path) -> Option<Self> {
        Self::from_text(text).filter(|moved| moved.image.file_name() == old_image(disk).file_name())
    }

    /// As [`Moved::told`], of a disk whose new image may lack its name still, because a process has ended before the other host was told. It is told now, if
    /// the caller `may_change` anything.
    async fn finished_late<F: Files>(&self, files: &F, disk: &Path, order: &Locator, may_change: bool) -> Error {
        if may_change {
            let done = match order::give(files, order).await {
                Ok(()) => self.write_done(files, disk).await,
                Err(error) => Err(error),
            };
            return match done {
                Ok(()) => self.told(disk),
                Err(error) => self.told(disk).caused_by(error).hint(
                    "the disk was handed over, and the other host could not be told to give it its name: try again when it answers",
                ),
            };
        }
        self.told(disk)
    }

    /// True when the process that handed the disk over to another path of this host has ended between the two names, or is just there.
    async fn is_broken_off<F: Files>(&self, files: &F, disk: &Path) -> bool {
        let (Locator::Path(to), Some(half)) = (&self.to, &self.half) else { return false };
        // With its new name the new image is the disk. Without the hidden one nobody knows what has become of it, and a disk that has left
        // the new path was there.
        let is_gone = is_free(files, disk).await && is_free(files, to).await && is_free(files, &names::moved(to)).await;
        is_gone && !is_free(files, half).await
    }

    /// What whoever looks for the disk at its old path `disk` is told.
    pub fn told(&self, disk: &Path) -> Error {
        let to = &self.to;
        let error = Error::new(ErrorKind::NotFound, format!("the disk was moved to {to}")).at_path(disk);
        error.hint(format!(
            "use {to}; the old image, which lacks what was written since, may be at {}",
            self.image.display()
        ))
    }
}

/// Looks for a disk that has no image at its path `disk`. When a process has ended in the middle of its hand-over, the old image gets its
/// name back, and the result is true. False when nothing is known of such a disk. `may_change`: the caller may change files.
///
/// # Errors
/// `NotFound` with the place that the disk was moved to; `Busy` while the hand-over is under way; the system's.
pub async fn take_back<F: Files>(files: &F, disk: &Path, may_change: bool) -> Result<bool> {
    let Some(moved) = Moved::read(files, disk).await? else { return Ok(false) };
    if may_change {
        // The process that took the old image its name may have been killed before that was durable: with the power it would come back, beside the new one.
        files.sync_names(&names::moved(disk)).await?;
    }
    if let Some(order) = &moved.finish {
        return Err(moved.finished_late(files, disk, order, may_change).await);
    }
    // An export is the disk as soon as the old image has lost its name; a file, at the latest when the note does not name its half any more.
    let Some(half) = moved.half.as_deref() else { return Err(moved.told(disk)) };
    if !moved.is_broken_off(files, disk).await {
        return Err(moved.told(disk));
    }
    if !may_change {
        let error = Error::new(ErrorKind::Busy, "the disk is just being moved, or its hand-over was broken off");
        return Err(error.at_path(disk).hint("try again; or open it for writing, which takes that back"));
    }
    // Whoever hands it over has both open. So has somebody else who moves a disk there.
    let open = async |path: &Path| match files.open(&path.into(), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(moved.told(disk)),
        opened => opened,
    };
    let (old, new) = (open(&moved.image).await?, open(half).await?);
    // The hand-over may have come to its end until they were open.
    let are_there = files.is_at(&old, &moved.image).await? && files.is_at(&new, half).await?;
    if !are_there || Moved::read(files, disk).await?.as_ref() != Some(&moved) || !moved.is_broken_off(files, disk).await
    {
        return Err(moved.told(disk));
    }
    rename_to_free(files, (&old, &moved.image), disk).await?;
    // The job goes on with a half of which it has noted something.
    if Note::look(files, disk).await?.is_none_or(|note| note.copied.is_none()) {
        remove_own(files, &new, half).await?;
    }
    remove_if_there(files, &names::moved(disk)).await?;
    drop((old, new));
    Ok(true)
}

/// Refuses to have the note of a disk that was at the path `disk` go, or be replaced, while that disk's hand-over has not come to its end: nothing else says what is left
/// to do. `own`: where the caller moves the disk that is there now. A note of that was left by a process before.
///
/// # Errors
/// `Exists`; the system's.
pub(super) async fn refuse_unfinished<F: Files>(files: &F, disk: &Path, own: Option<&Locator>) -> Result<()> {
    let note = names::moved(disk);
    let Some(moved) = Moved::read(files, disk).await? else {
        if is_free(files, &note).await || is_there(files, &note).await? {
            return Ok(());
        }
        let what = "a note of a move is in the way that this user's Spile has not made";
        let hint = "look whose it is, and what disk was moved from here; then remove it";
        return Err(Error::new(ErrorKind::Exists, what).at_path(&note).hint(hint));
    };
    if moved.finish.is_none() && !moved.is_broken_off(files, disk).await || own == Some(&moved.to) {
        return Ok(());
    }
    let to = &moved.to;
    // Only the message goes to another host.
    let what = format!(
        "another disk was handed over from this path to {to}, and that has not come to its end; only the note {} tells what is left to do",
        note.display()
    );
    let hint = "while no file has this path, start a server with it (spile serve), which ends that hand-over; or remove the note, when that disk is \
         known to have its name there, or is not needed";
    Err(Error::new(ErrorKind::Exists, what).at_path(disk).hint(hint))
}

/// True when nothing has the name `path`, as far as can be seen.
pub(super) async fn is_free<F: Files>(files: &F, path: &Path) -> bool {
    files.canonical(path).await.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Gives the file of `store`, at `from`, the name `to`, durably, and takes its old one. No other file loses a name.
///
/// # Errors
/// `Exists` when there is something at `to`; the system's. The file has one of its names then, or both.
pub(super) async fn rename_to_free<F: Files>(files: &F, (store, from): (&F::Store, &Path), to: &Path) -> Result<()> {
    match files.link_file((store, from), to).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            refuse_taken(files, to).await?;
            files.rename_file((store, from), (to, None)).await
        }
        Err(error) => Err(error),
        Ok(()) => files.remove_file(store, from).await,
    }
}

/// # Errors
/// `Exists` when there is something at `path`, or may be.
pub(super) async fn refuse_taken<F: Files>(files: &F, path: &Path) -> Result<()> {
    match is_free(files, path).await {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Exists, "there is a file of the new name already")
            .at_path(path)
            .hint("remove it, or give it another name")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        let path = Locator::Path("/new/a b.vhd".into());
        let to_file = Moved { to: path, image: "/vm/a.moved.vhd".into(), half: Some("/new/.h".into()), finish: None };
        let done = Moved { half: None, ..to_file.clone() };
        let (to, order) = (Locator::Nbd("nbd://h/x".to_owned()), Locator::Nbd("nbd://h/finish/x".to_owned()));
        let to_host = Moved { to, image: "/vm/a.moved.vhd".into(), half: None, finish: Some(order) };
        let to_export = Moved { finish: None, ..to_host.clone() };
        for moved in [&to_file, &done, &to_export, &to_host] {
            let text = moved.to_text().unwrap();
            assert_eq!(Moved::from_text(&text).as_ref(), Some(moved));
            for len in 0..text.len() {
                assert_eq!(Moved::from_text(&text[..len]), None, "{:?}", &text[..len]);
            }
        }
        assert!(Moved { to: Locator::Path("/a\nb".into()), ..to_file }.to_text().is_err());
    }
}
