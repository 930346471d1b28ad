//! [`Receiver`]: takes in disks that other hosts move here. It knows files only; who brings the orders is its caller's affair.
//!
//! A disk that is taken in is under a hidden name ([`names::receiving`]) until the old place says that it is whole. Then it gets its own name, which
//! nothing had before, durably. The note [`Received`] beside it says which move it belongs to: nobody else gets at it by an order, and a file that was
//! put in its place is not taken for it.
//!
//! # A disk that comes with its parents
//!
//! Each parent comes as a disk of its own, the lowest first, by the same orders and through the same states: its image is made under a hidden name, is filled
//! and flushed, and gets its name durably. Three things are different.
//!
//! - An image is made over the parent that its order names, which has come here, and has its name. From then on that parent has a child, and nobody writes to it.
//! - Its note says that it is a parent. Nobody writes to it any more once it has its name: its child may not be there yet.
//! - Each process of the old place begins an attempt of its own. An image that an earlier attempt has begun is not gone on with, for nobody knows what it holds: it is
//!   made anew, empty. An order of an earlier attempt, which was on its way for long, changes nothing of a later one.

mod errors;
mod name;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files, OpenMode, Result, ResultExt, Store};
use spile_image::create::NewImage;
use spile_image::layer::{Identity, Layer as _};
use spile_image::{Format, Graph, OpenOptions};

pub use self::errors::is_free_here;
use self::errors::{bad_name, is_whole, later_attempt, no_old_image, no_such_disk, no_such_move, other_half};
use super::back::Left;
use super::note::{is_free, refuse_taken, refuse_unfinished};
use super::old_image;
use super::order::{Below, InChain, Like, is_earlier_attempt, is_name};
use super::place::remove_half;
use crate::changes::header::{MOST_FILE_BYTES, PAGE_BYTES};
use crate::gone::Gone;
use crate::jobs::note::{from_hex, read_text, to_hex, write_text};
use crate::names;
use crate::snapshot::{new_child, remove_if_there};
use crate::work::GraphOf;

/// What the note beside a disk that is taken in says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The move that it belongs to.
    pub id: Identity,
    /// The disk's size.
    pub size_bytes: u64,
    /// The image's format.
    pub format: Format,
    /// How far it is.
    pub state: ReceivedState,
    /// Which file it is, in the words of the caller.
    pub file: String,
    /// It is a parent of a disk that comes, or has come, and not a disk of its own.
    pub is_parent: bool,
}

/// How far a disk is that is taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedState {
    /// Its image is made: what there is may be no image yet.
    Making,
    /// It may lack anything.
    Half,
    /// It may be the disk already: only the old place knows. An empty file keeps its name for it.
    HandingOver,
    /// It has its name.
    Whole,
}

/// The first line of every note begins so.
const ANY_HEAD: &str = "spile received ";
const HEAD: &str = "spile received 1";
/// A line of the note of a parent. Versions that do not know it leave such a note alone.
const PARENT: &str = "parent";
const END: &str = "end";

impl ReceivedState {
    /// Its name in notes, in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Making => "making",
            Self::Half => "half",
            Self::HandingOver => "handing-over",
            Self::Whole => "whole",
        }
    }

    /// True when what is there is not known to be whole.
    fn may_be_half(self) -> bool {
        matches!(self, Self::Half | Self::HandingOver)
    }
}

impl Received {
    fn to_text(&self) -> String {
        let Self { id, size_bytes, format, state, file, is_parent } = self;
        let (id, state) = (to_hex(*id), state.name());
        let parent = if *is_parent { format!("{PARENT}\n") } else { String::new() };
        format!("{HEAD}\nmove {id}\nsize {size_bytes}\nformat {format}\nstate {state}\nfile {file}\n{parent}{END}\n")
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines();
        lines.next().filter(|head| *head == HEAD)?;
        let mut next = |before: &str| lines.next()?.strip_prefix(before);
        let (id, size_bytes) = (Identity(from_hex(next("move ")?)?), next("size ")?.parse().ok()?);
        let format = next("format ")?.parse().ok()?;
        let state = next("state ")?;
        let states = [ReceivedState::Making, ReceivedState::Half, ReceivedState::HandingOver, ReceivedState::Whole];
        let state = states.into_iter().find(|known| known.name() == state)?;
        let file = next("file ")?.to_owned();
        let is_parent = match lines.next() {
            None => false,
            Some(PARENT) if lines.next().is_none() => true,
            Some(_) => return None,
        };
        Some(Self { id, size_bytes, format, state, file, is_parent })
    }

    /// The note of the disk at `disk`, if there is one that was written to its end.
    ///
    /// # Errors
    /// `Unsupported` for a note of another version; the system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        let path = names::received(disk);
        let Some(text) = read_text(files, &path).await? else { return Ok(None) };
        let note = Self::from_text(&text);
        if note.is_none() && text.starts_with(ANY_HEAD) && text.ends_with(&format!("\n{END}\n")) {
            let what = "another version of Spile has taken this disk in, and written this note of it";
            return Err(Error::new(ErrorKind::Unsupported, what).at_path(&path).hint("go on with that version"));
        }
        Ok(note)
    }

    /// The image that this is the note of, which is at `path`. It has its name there, or has not.
    fn place(&self, path: &Path, has_name: bool) -> Place {
        let Self { format, size_bytes, is_parent, .. } = *self;
        Place { path: path.to_owned(), format, size_bytes, is_parent, is_sealed: is_parent && has_name }
    }

    async fn write<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        let new = names::new_received(disk);
        remove_if_there(files, &new).await?;
        write_text(files, &new, &self.to_text()).await?;
        files.rename(&new, &names::received(disk)).await
    }
}

/// True when the image at `image` has come here as a parent of a disk: nobody writes to it, although its child may not be here yet.
///
/// # Errors
/// As [`Received::read`].
pub async fn is_parent<F: Files>(files: &F, image: &Path) -> Result<bool> {
    Ok(Received::read(files, image).await?.is_some_and(|note| note.is_parent))
}

/// From now on the image at `image` is no parent that has come here, but one as every other: nobody needs it as it is.
///
/// # Errors
/// As [`is_parent`]; the system's.
pub(crate) async fn forget_parent<F: Files>(files: &F, image: &Path) -> Result<()> {
    match is_parent(files, image).await? {
        true => remove_if_there(files, &names::received(image)).await,
        false => Ok(()),
    }
}

/// An image that was taken in, or is being taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it is now: the hidden name, or the disk's own.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The disk's size.
    pub size_bytes: u64,
    /// It is a parent of a disk that comes, or has come.
    pub is_parent: bool,
    /// It is a parent that has its name: nobody writes to it any more.
    pub is_sealed: bool,
}

/// Takes disks in. Whoever has one does one thing with a disk at a time.
pub struct Receiver<'a, F: Files> {
    /// The files of this host.
    pub files: &'a F,
    /// Opens files without locks, to ask which they are.
    pub asking: &'a F,
    /// Random bytes and the time.
    pub env: &'a Arc<dyn Env>,
    /// The folder for disks that come. It has no link in its path.
    pub folder: &'a Path,
    /// Which file a store is, in words that stay the same for as long as the file is there: one line.
    pub which: &'a (dyn Fn(&F::Store) -> String + Sync),
}

impl<F: Files> Receiver<'_, F> {
    /// The path of the disk `name`.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is none.
    pub fn disk(&self, name: &str) -> Result<PathBuf> {
        match is_name(name) {
            true => Ok(self.folder.join(name)),
            false => Err(bad_name()),
        }
    }

    /// The image of the move `id`, of `size_bytes`; made if it is not there.
    ///
    /// # Errors
    /// `Exists` when another file has the name; `Busy` when it is that of another move; `InvalidInput` for a size or a name that cannot be; the
    /// system's.
    pub async fn begin(&self, name: &str, id: Identity, size_bytes: u64) -> Result<Place> {
        let disk = self.disk(name)?;
        let image = Begun { id, size_bytes, format: Format::of(&disk, None)?, in_chain: None };
        self.begin_image(&disk, &image).await.map(|(place, _)| place)
    }

    /// As [`Receiver::begin`], of one image of a disk that comes with its parents. True when it was made now: whatever was there before of this move is gone.
    ///
    /// # Errors
    /// As [`Receiver::begin`]; `Denied` when a later attempt of this move is under way, or the parent is not the one that the order means.
    pub async fn begin_in_chain(
        &self,
        name: &str,
        id: Identity,
        size_bytes: u64,
        image: &InChain,
    ) -> Result<(Place, bool)> {
        let disk = self.disk(name)?;
        self.begin_image(&disk, &Begun { id, size_bytes, format: image.like.format, in_chain: Some(image) }).await
    }

    async fn begin_image(&self, disk: &Path, image: &Begun<'_>) -> Result<(Place, bool)> {
        let (half, id, size_bytes) = (names::receiving(disk), image.id, image.size_bytes);
        match Received::read(self.files, disk).await? {
            Some(note) if note.id == id => {
                // One that was never made may have been of another size: nothing goes on with it.
                if note.size_bytes != size_bytes && note.state != ReceivedState::Making {
                    let what =
                        format!("this move has begun with a disk of {} bytes, not {size_bytes}", note.size_bytes);
                    return Err(Error::new(ErrorKind::InvalidInput, what).at_path(disk));
                }
                if let Some((note, place)) = self.find(disk, note.clone()).await? {
                    return Ok((self.half_again(disk, note, place).await?, false));
                }
                if note.state != ReceivedState::Making && !is_free(self.files, &half).await {
                    return Err(other_half(&half));
                }
                remove_if_there(self.files, &half).await?;
            }
            Some(note) if is_earlier_attempt(note.id, id) => self.remove_earlier(disk, note).await?,
            Some(note) if is_earlier_attempt(id, note.id) => {
                return Err(later_attempt(disk));
            }
            Some(note) if note.state.may_be_half() && !is_free(self.files, &half).await => {
                // A parent that nobody is connected to may be waited for in vain. When its move comes again, it finds this one.
                let are_parents = note.is_parent && image.in_chain.is_some_and(|image| image.is_parent);
                let is_left = are_parents && self.is_file(&half, &note).await?;
                if !is_left || remove_half(self.files, &half).await.is_err() {
                    let what = "a disk of this name is being moved here by another move";
                    let hint = "wait for it; or, when it is given up, `spile receive DIR --remove NAME`";
                    return Err(Error::new(ErrorKind::Busy, what).at_path(disk).hint(hint));
                }
            }
            Some(note) if note.state == ReceivedState::Making => remove_if_there(self.files, &half).await?,
            _ => {}
        }
        Ok((self.make(disk, image).await?, true))
    }

    /// Removes what an earlier attempt has begun, of which `note` is the note. The note stays: until there is another one, it names a file that is not there.
    async fn remove_earlier(&self, disk: &Path, note: Received) -> Result<()> {
        let half = names::receiving(disk);
        match self.find(disk, note.clone()).await? {
            Some((found, _)) if found.state == ReceivedState::Whole => return Err(is_whole(disk)),
            Some(_) => {}
            None if note.state == ReceivedState::Making => {}
            None if !is_free(self.files, &half).await => return Err(other_half(&half)),
            None => {}
        }
        if note.state == ReceivedState::HandingOver {
            self.remove_keeper(disk).await?;
        }
        remove_if_there(self.files, &half).await
    }

    /// True when a parent of this name has come here, has its name, and is `like` that and as long. False when nothing has the name.
    ///
    /// # Errors
    /// `Exists` when something else has the name; the system's.
    pub async fn find_parent(&self, name: &str, id: Identity, size_bytes: u64, like: &Like) -> Result<bool> {
        let disk = self.disk(name)?;
        if is_free(self.files, &disk).await {
            return Ok(false);
        }
        let other = |why: String| {
            let what = format!("another file has this name: {why}");
            let hint = "move the disk to another folder; or flatten it there: --chain flatten";
            Err(Error::new(ErrorKind::Exists, what).at_path(&disk).hint(hint))
        };
        let note = Received::read(self.files, &disk).await?;
        let is_settled = note.as_ref().is_some_and(|note| note.state == ReceivedState::Whole);
        let is_ours = |note: &Received| note.id == id || is_earlier_attempt(note.id, id);
        if let Some(note) = &note
            && note.state == ReceivedState::HandingOver
            && is_ours(note)
            && self.is_keeper(&disk).await?
        {
            return Ok(false);
        }
        if let Some(note) = note.filter(|note| is_ours(note) && !note.is_parent)
            && self.find(&disk, note).await?.is_some_and(|(note, _)| note.state == ReceivedState::Whole)
        {
            return Err(is_whole(&disk));
        }
        let Some((place, note)) = self.parent(&disk).await? else {
            return other("it has not come here as a parent".to_owned());
        };
        if !is_settled {
            // A process has ended right after it has given the name.
            self.settle(&disk, &note).await?;
        }
        if (place.format, place.size_bytes) != (like.format, size_bytes) {
            let (format, len_bytes) = (place.format, place.size_bytes);
            return other(format!("it is a {format} of {len_bytes} bytes, and not a {} of {size_bytes}", like.format));
        }
        let uuid = self.open_parent(&place).await?.handles()[0].image().identity();
        match like.uuid.is_none() || like.uuid == uuid {
            true => Ok(true),
            false => other("its UUID is another".to_owned()),
        }
    }

    /// The parent at `disk`, which has come here and has its name, and its note as it is true.
    async fn parent(&self, disk: &Path) -> Result<Option<(Place, Received)>> {
        let Some(note) = Received::read(self.files, disk).await?.filter(|note| note.is_parent) else { return Ok(None) };
        let is_deleted = !is_free(self.files, &names::gone(disk)).await;
        let found = self.find(disk, note).await?.filter(|(note, _)| note.state == ReceivedState::Whole && !is_deleted);
        Ok(found.map(|(note, place)| (place, note)))
    }

    /// Opens a parent for reading: until it is dropped, nobody writes to it.
    async fn open_parent(&self, place: &Place) -> Result<GraphOf<F>> {
        let options = OpenOptions { format: Some(place.format), read_only: true, ..OpenOptions::default() };
        Box::pin(Graph::open(self.files, self.env.clone(), place.path.as_path(), &options)).await
    }

    /// The old image that the disk has left here by the move `of`, as the half of the move `id`, by which it comes back. It may be the half of another move
    /// back that has never written to it: that one has not heard the answer, and was given up. `look` tells what files look like from outside,
    /// as [`Marks::look`](crate::Marks::look).
    ///
    /// # Errors
    /// `NotFound` when there is none; `Denied` when it, or a parent of it, was written to or replaced since, or somebody has it open; `Exists` when the disk's name
    /// is taken, or another move comes here; the system's, when that is not known.
    pub async fn take_back(
        &self,
        name: &str,
        (id, of): (Identity, Identity),
        size_bytes: u64,
        look: impl AsyncFn(&[PathBuf]) -> Option<String>,
    ) -> Result<Place> {
        let disk = self.disk(name)?;
        let (half, image) = (names::receiving(&disk), old_image(&disk));
        let left = Left::read(self.files, &disk).await?;
        let is_meant = |left: &Left| left.id == of && left.image.from == disk && left.image.size_bytes == size_bytes;
        let left = left.filter(is_meant).ok_or_else(|| no_old_image(&disk))?;
        refuse_taken(self.files, &disk).await?;
        refuse_unfinished(self.files, &disk, None).await?;
        let before = Received::read(self.files, &disk).await?.filter(|note| note.state != ReceivedState::Whole);
        // An answer may not have been heard; the move that has asked may have been given up since, and this is the next one.
        let (is_taken, is_own) = match &before {
            Some(note) => (self.is_file(&half, note).await?, note.id == id),
            None => (false, false),
        };
        if before.as_ref().is_some_and(|note| is_earlier_attempt(id, note.id)) {
            return Err(later_attempt(&disk));
        }
        let other_move =
            || Error::new(ErrorKind::Exists, "a disk of this name is being moved here by another move").at_path(&disk);
        let other = before.as_ref().filter(|_| !is_own);
        if let Some(note) = other
            && (!is_taken || note.state != ReceivedState::Half)
            && !is_free(self.files, &half).await
        {
            return Err(other_move());
        }
        let path = if is_taken { &half } else { &image };
        // Whoever has it open for writing may write to it, and nobody can open it so now.
        let store = match self.files.open(&path.into(), OpenMode::ReadOnly).await {
            // What it says of its own half may change in a moment.
            Err(error) if error.kind() == ErrorKind::Busy && !(is_taken && is_own) => {
                return Err(Error::new(ErrorKind::Denied, "somebody has the old image open").at_path(path));
            }
            opened => opened?,
        };
        let images: Vec<_> = [path.clone()].into_iter().chain(left.image.images().into_iter().skip(1)).collect();
        if look(&images).await.is_none_or(|look| look != left.image.look) {
            let what = "the old image, or a parent of it, was written to or replaced since the disk has left";
            let written = Error::new(ErrorKind::Denied, what).at_path(path);
            return Err(other.filter(|_| is_taken).map_or(written, |_| other_move()));
        }
        if !is_taken {
            refuse_taken(self.files, &half).await?;
        }
        if !(is_taken && is_own) {
            self.forget_changes(&disk).await?;
            let (format, state, file) = (left.image.format, ReceivedState::Half, (self.which)(&store));
            // In this order: a half has its note.
            Received { id, size_bytes, format, state, file, is_parent: false }.write(self.files, &disk).await?;
        }
        if !is_taken {
            self.files.rename_file((&store, &image), (&half, None)).await?;
        }
        drop(store);
        Ok(Place { path: half, format: left.image.format, size_bytes, is_parent: false, is_sealed: false })
    }

    /// Refuses to go on with the copy of the move `id` when that is whole: it has its name, and whoever is here may use it. Whoever asks has the
    /// disk at its old place: the image here is half a copy of it.
    ///
    /// # Errors
    /// `Denied` then; `NotFound` when there is no such image; the system's.
    pub async fn check_half(&self, name: &str, id: Identity) -> Result<Place> {
        let disk = self.disk(name)?;
        let (note, place) = self.of_move(&disk, id).await?;
        self.half_again(&disk, note, place).await
    }

    /// The half that the attempt `of` of a move has begun is that of the later attempt `id` from now on.
    ///
    /// # Errors
    /// As [`Receiver::check_half`].
    pub async fn take_over(&self, name: &str, id: Identity, of: Identity) -> Result<Place> {
        let disk = self.disk(name)?;
        let note = Received::read(self.files, &disk).await?;
        let is_meant = |note: &Received| note.id == id || note.id == of && is_earlier_attempt(of, id);
        let Some(note) = note.filter(is_meant) else { return Err(no_such_move(&disk)) };
        let Some((mut note, place)) = self.find(&disk, note).await? else { return Err(no_such_move(&disk)) };
        if note.state == ReceivedState::Whole {
            return Err(is_whole(&disk));
        }
        note.id = id;
        note.write(self.files, &disk).await?;
        self.half_again(&disk, note, place).await
    }

    /// The image of the move `id`, which is not whole.
    ///
    /// # Errors
    /// `Denied` when it has its name; `NotFound` when there is no such image; the system's.
    pub async fn half(&self, name: &str, id: Identity) -> Result<Place> {
        match self.go_on(name, id).await? {
            (place, ReceivedState::Whole) => Err(is_whole(&place.path)),
            (place, _) => Ok(place),
        }
    }

    /// The image of `note`, at `place`, was not handed over.
    async fn half_again(&self, disk: &Path, mut note: Received, place: Place) -> Result<Place> {
        match note.state {
            ReceivedState::Whole => return Err(is_whole(disk)),
            ReceivedState::HandingOver => {
                self.remove_keeper(disk).await?;
                note.state = ReceivedState::Half;
                note.write(self.files, disk).await?;
            }
            ReceivedState::Making | ReceivedState::Half => {}
        }
        Ok(place)
    }

    /// The image of the move `id`, all of which was flushed, may be the disk from now on: only the old place knows. It is not removed as one that was
    /// given up, and its name is kept for it, by an empty file that nobody can take for a disk.
    ///
    /// # Errors
    /// `Exists` when another file has got the name; `Denied` when it is whole; `NotFound` when there is no such image; the system's.
    pub async fn hand_over(&self, name: &str, id: Identity) -> Result<()> {
        let disk = self.disk(name)?;
        let (mut note, _) = self.of_move(&disk, id).await?;
        match note.state {
            ReceivedState::Whole => return Err(is_whole(&disk)),
            ReceivedState::HandingOver => {}
            ReceivedState::Making | ReceivedState::Half => {
                refuse_taken(self.files, &disk).await?;
                // The last moment: once the old place has lost its name, this image must get its own.
                refuse_unfinished(self.files, &disk, None).await?;
                note.state = ReceivedState::HandingOver;
                note.write(self.files, &disk).await?;
            }
        }
        // Who ended before the name was kept is here again.
        match self.files.create(&disk, 0).await {
            Err(error) if error.kind() == ErrorKind::Exists && self.is_keeper(&disk).await? => Ok(()),
            created => created.map(drop).at_path(&disk),
        }
    }

    /// The image of the move `id`, which is there, and how far it is.
    ///
    /// # Errors
    /// `NotFound` when there is no such image; the system's.
    pub async fn go_on(&self, name: &str, id: Identity) -> Result<(Place, ReceivedState)> {
        let disk = self.disk(name)?;
        let (note, place) = self.of_move(&disk, id).await?;
        Ok((place, note.state))
    }

    /// As [`Receiver::go_on`], for whoever writes to the image.
    ///
    /// # Errors
    /// As [`Receiver::go_on`]; `Denied` for a parent that has its name.
    pub async fn write_on(&self, name: &str, id: Identity) -> Result<(Place, ReceivedState)> {
        let (place, state) = self.go_on(name, id).await?;
        if place.is_sealed { Err(is_whole(&place.path)) } else { Ok((place, state)) }
    }

    async fn make(&self, disk: &Path, image: &Begun<'_>) -> Result<Place> {
        let (half, &Begun { id, size_bytes, format, in_chain }) = (names::receiving(disk), image);
        refuse_taken(self.files, disk).await?;
        refuse_unfinished(self.files, disk, None).await?;
        refuse_taken(self.files, &half).await?;
        // The parent is open, so that nobody writes to it, until the new image names it.
        let below = match in_chain.and_then(|image| image.below.as_ref()) {
            Some(below) => Some(self.below(disk, below).await?),
            None => None,
        };
        let mut new = match &below {
            Some(below) => new_child(&below.handles()[0].info(), size_bytes, below.handles()[0].path())?,
            None => NewImage::new(size_bytes),
        };
        new.uuid = in_chain.and_then(|image| image.like.uuid);
        // What was noted of a disk that is gone says nothing of this one.
        self.forget_changes(disk).await?;
        let (state, is_parent) = (ReceivedState::Making, in_chain.is_some_and(|image| image.is_parent));
        let mut note = Received { id, size_bytes, format, state, file: "-".to_owned(), is_parent };
        let made = self.make_half(disk, &mut note, &new).await;
        if made.is_err() {
            // Nobody goes on with it, and a later order of this name must not find it.
            for path in [half.clone(), names::received(disk), names::new_received(disk)] {
                let _ = remove_if_there(self.files, &path).await;
            }
        }
        made.map(|()| note.place(&half, false))
    }

    /// Makes the image of `note`, whose name nothing has.
    async fn make_half(&self, disk: &Path, note: &mut Received, new: &NewImage) -> Result<()> {
        note.write(self.files, disk).await?;
        let store = self.files.create(&names::receiving(disk), 0).await?;
        note.format.create(&store, &**self.env, new).await?;
        store.sync().await?;
        (note.state, note.file) = (ReceivedState::Half, (self.which)(&store));
        drop(store);
        note.write(self.files, disk).await
    }

    /// The parent that the image of `disk` is to be made over.
    async fn below(&self, disk: &Path, below: &Below) -> Result<GraphOf<F>> {
        let path = self.disk(&below.name)?;
        let found = if path == disk { None } else { self.parent(&path).await? };
        match found.filter(|(_, note)| below.by.is_none_or(|meant| meant == note.id)) {
            Some((place, _)) => self.open_parent(&place).await,
            None => {
                let what = "the parent that this image is to be made over is not here, or another image has its name";
                Err(Error::new(ErrorKind::Denied, what).at_path(&path).hint("begin the move again"))
            }
        }
    }

    /// Where the image of `note` is, if it is there and no other file in its place; and the note as it is true. An image that has its name is whole: a process
    /// that ended between the name and the note has left the old one.
    async fn find(&self, disk: &Path, mut note: Received) -> Result<Option<(Received, Place)>> {
        if note.state == ReceivedState::Making {
            return Ok(None);
        }
        let half = names::receiving(disk);
        for path in [disk, &half] {
            if self.is_file(path, &note).await? {
                if path == disk {
                    note.state = ReceivedState::Whole;
                }
                let place = note.place(path, path == disk);
                return Ok(Some((note, place)));
            }
        }
        Ok(None)
    }

    /// True when `path` names the file that was taken in, itself and not by a link.
    async fn is_file(&self, path: &Path, note: &Received) -> Result<bool> {
        match self.files.canonical(path).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
            Ok(canonical) if canonical != path => return Ok(false),
            Ok(_) => {}
        }
        let store = self.asking.open(&path.into(), OpenMode::ReadOnly).await?;
        Ok((self.which)(&store) == note.file)
    }

    /// The image of the move `id` gets its name: all of it was flushed, and the old place is not the disk any more. `open` is the image, if it is
    /// open here. It may have its name already.
    ///
    /// # Errors
    /// `NotFound` when there is no such image; `Exists` when another file has got the name; the system's. The image has its hidden name then, or both.
    pub async fn finish(&self, name: &str, id: Identity, open: Option<&F::Store>) -> Result<Place> {
        let disk = self.disk(name)?;
        let half = names::receiving(&disk);
        let (mut note, place) = self.of_move(&disk, id).await?;
        if place.path == half {
            // That of a disk was asked for before its hand-over began.
            if note.is_parent {
                refuse_unfinished(self.files, &disk, None).await?;
            }
            // Where a disk went that was there says nothing about this one; nor does what was to become of an image that was deleted.
            remove_if_there(self.files, &names::moved(&disk)).await?;
            Gone::remove(self.files, &disk).await?;
            let opened;
            let store = match open {
                Some(store) => store,
                None => {
                    opened = self.asking.open(&half.as_path().into(), OpenMode::ReadOnly).await?;
                    &opened
                }
            };
            match self.files.link_file((store, &half), &disk).await {
                Err(error)
                    if error.kind() == ErrorKind::Exists
                        && note.state == ReceivedState::HandingOver
                        && self.is_keeper(&disk).await? =>
                {
                    let keeper = self.asking.open(&disk.as_path().into(), OpenMode::ReadOnly).await?;
                    self.files.rename_file((store, &half), (&disk, Some(&keeper))).await?;
                }
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    refuse_taken(self.files, &disk).await?;
                    self.files.rename_file((store, &half), (&disk, None)).await?;
                }
                linked => linked.at_path(&disk)?,
            }
        }
        note.state = ReceivedState::Whole;
        self.settle(&disk, &note).await?;
        if let Some(store) = open {
            store.set_path(&disk);
        }
        let is_sealed = note.is_parent;
        Ok(Place { path: disk, is_sealed, ..place })
    }

    /// The image at `disk` has its name, as `note` says from now on. It loses the hidden one, and what nobody reads any more goes.
    async fn settle(&self, disk: &Path, note: &Received) -> Result<()> {
        let half = names::receiving(disk);
        note.write(self.files, disk).await?;
        if self.is_file(&half, note).await? {
            self.files.remove(&half).await?;
        }
        let _ = remove_if_there(self.files, &names::left(disk)).await;
        let _ = remove_if_there(self.files, &names::new_changes(disk)).await;
        Ok(())
    }

    /// The half-made image of the move `id` goes, and so does its note: also one that an earlier attempt of that has begun.
    ///
    /// # Errors
    /// `NotFound` when there is none; `Denied` when it is whole; the system's.
    pub async fn drop_half(&self, name: &str, id: Identity) -> Result<()> {
        let disk = self.disk(name)?;
        let note = Received::read(self.files, &disk).await?;
        let is_meant = |note: &Received| note.id == id || is_earlier_attempt(note.id, id);
        if note.as_ref().is_none_or(is_meant) {
            // A process that ended while it wrote a note has left that.
            remove_if_there(self.files, &names::new_received(&disk)).await?;
        }
        match note.filter(is_meant) {
            None => Err(no_such_move(&disk)),
            Some(note) if note.state == ReceivedState::Whole || self.is_file(&disk, &note).await? => {
                if note.is_parent {
                    self.settle(&disk, &Received { state: ReceivedState::Whole, ..note }).await?;
                }
                Err(Error::new(ErrorKind::Denied, "the disk was handed over, and is whole").at_path(&disk))
            }
            Some(note) => {
                let half = names::receiving(&disk);
                if note.state == ReceivedState::Making || self.is_file(&half, &note).await? {
                    remove_if_there(self.files, &half).await?;
                }
                if note.state == ReceivedState::HandingOver {
                    self.remove_keeper(&disk).await?;
                }
                self.forget_changes(&disk).await?;
                remove_if_there(self.files, &names::received(&disk)).await
            }
        }
    }

    /// Makes the file, of `len_bytes`, for what has changed of the disk that comes by the move `id`. What an earlier try has left of it goes.
    ///
    /// # Errors
    /// `InvalidInput` for a length that cannot be; `Denied` when the image has its name already; `Exists` when another file has it; `NotFound` when there is no image; the system's.
    pub async fn begin_marks(&self, name: &str, id: Identity, len_bytes: u64) -> Result<Place> {
        let disk = self.disk(name)?;
        self.half(name, id).await?;
        self.check_name(name).await?;
        let path = names::new_changes(&disk);
        if !(1..=MOST_FILE_BYTES).contains(&len_bytes) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            let what = format!("no file of changed blocks has {len_bytes} bytes");
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(&path));
        }
        remove_if_there(self.files, &path).await?;
        drop(self.files.create(&path, len_bytes).await?);
        Ok(Place { path, format: Format::Raw, size_bytes: len_bytes, is_parent: false, is_sealed: false })
    }

    /// The disk of this name that was handed over here.
    ///
    /// # Errors
    /// `NotFound` when there is none; `Busy` while it is being moved here; the system's.
    pub async fn whole(&self, name: &str) -> Result<Place> {
        let disk = self.disk(name)?;
        let Some(note) = Received::read(self.files, &disk).await? else { return Err(no_such_disk(&disk)) };
        if note.state != ReceivedState::Whole {
            // Only the message goes to the other host.
            let what = match note.state {
                ReceivedState::HandingOver => {
                    "the disk is being handed over here: when its old host says that it is here, a server that is started there with the old path has it named"
                }
                _ => "the disk is being moved here, and is not handed over yet: it is where it was",
            };
            return Err(Error::new(ErrorKind::Busy, what).at_path(&disk));
        }
        match self.is_file(&disk, &note).await? {
            true => Ok(note.place(&disk, true)),
            false => Err(no_such_disk(&disk)),
        }
    }

    async fn of_move(&self, disk: &Path, id: Identity) -> Result<(Received, Place)> {
        let note = Received::read(self.files, disk).await?.filter(|note| note.id == id);
        let Some(note) = note else { return Err(no_such_move(disk)) };
        self.find(disk, note).await?.ok_or_else(|| no_such_move(disk))
    }
}

/// An image that is to be there.
struct Begun<'a> {
    id: Identity,
    size_bytes: u64,
    format: Format,
    in_chain: Option<&'a InChain>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        for state in [ReceivedState::Making, ReceivedState::Half, ReceivedState::HandingOver, ReceivedState::Whole] {
            for is_parent in [false, true] {
                let (id, file) = (Identity([9; 16]), "7".to_owned());
                let note = Received { id, size_bytes: 1 << 30, format: Format::Vhd, state, file, is_parent };
                let text = note.to_text();
                assert_eq!(Received::from_text(&text).as_ref(), Some(&note));
                for len in 0..text.len() {
                    assert_eq!(Received::from_text(&text[..len]), None, "{:?}", &text[..len]);
                }
            }
        }
    }
}
