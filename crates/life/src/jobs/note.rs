//! The note beside a disk that says which job is under way ([`names::job`]).
//!
//! It is written before the job changes anything, and removed after its last change. It says nothing about progress: that is
//! seen in the images. A note that was not written to its end says nothing, because then nothing had begun. A job that is stopped writes
//! its note anew, with what its users want of it by then.

use std::iter::Peekable;
use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_image::Graph;
use spile_image::layer::Identity;

use crate::motion::Move;
use crate::names;
use crate::snapshot::remove_if_there;

/// What a job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Merges a layer into its parent.
    Coalesce(Merged),
    /// Copies into the leaf what it lacks, so that it needs no parent.
    Flatten,
    /// Moves the disk to another place.
    Move(Move),
}

/// The layer that is merged away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Which image it is ([`GraphLayer::which`](spile_image::GraphLayer::which)), or [`Merged::UNKNOWN`].
    pub identity: Identity,
    /// Where it lay when the job began.
    pub path: PathBuf,
    /// Where its parent lay.
    pub parent: PathBuf,
    /// It is a snapshot that its user keeps: in the end its parent takes its name. The leaf's parent always does that.
    pub keeps_name: bool,
}

impl Merged {
    /// Stands for a layer that nobody can tell later: it is known by its name alone, and its file is not removed later.
    pub const UNKNOWN: Identity = Identity([0; 16]);
}

/// What its users want of a job, besides what it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// It waits until it is resumed.
    pub is_paused: bool,
    /// The rate that it must not exceed, in bytes a second.
    pub limit_bytes_per_s: Option<u64>,
}

/// What a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What the job does.
    pub plan: Plan,
    /// What its users want of it.
    pub wishes: Wishes,
    /// The disk's own image ([`which`]), where that stays the same to the job's end: another disk may get the name that this one had.
    pub of: Option<Identity>,
    /// How far the copy of a move is.
    pub copied: Option<Copied>,
    /// What the other host of a move has done, as far as that is known.
    pub there: Option<There>,
}

/// How far the copy of a move is, durably: the next process need not copy that anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// So many bytes from the disk's begin on are durable in the half, but for what has changed since the move began.
    pub until_bytes: u64,
    /// Which half that is: one line.
    pub half: String,
}

/// Which image the disk of `graph` is: as it says itself, or, of one that does not say it for good, which file. `None` where nobody can tell.
pub fn which<S: Store>(graph: &Graph<S>) -> Option<Identity> {
    graph.handles()[0].which()
}

/// What the other host that a disk is moved to has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// It takes disks in: the image is made by it. An export of that name which another server has is another disk.
    TakenIn,
    /// The copy is whole: nothing more is written to it but its name.
    Naming,
}

impl There {
    fn name(self) -> &'static str {
        match self {
            Self::TakenIn => "taken-in",
            Self::Naming => "naming",
        }
    }
}

/// The first line of every note begins so.
const ANY_HEAD: &str = "spile job ";
/// The first line: a note of another form is left alone.
const HEAD: &str = "spile job 1";
/// A line of the note of a move that keeps the chain.
const KEEPS_CHAIN: &str = "chain keep";
/// The first line of a merge whose layer keeps its name. Versions that do not know it leave such a note alone.
const KEEPING: &str = "coalesce keeping name";
/// The last line: without it the note was not written to its end.
const END: &str = "end";
/// No note is longer.
const MOST_BYTES: u64 = 64 << 10;

impl Plan {
    /// Its name for people and in JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Coalesce(_) => "coalesce",
            Self::Flatten => "flatten",
            Self::Move(_) => "move",
        }
    }

    fn to_lines(&self) -> Result<String> {
        Ok(match self {
            Self::Coalesce(Merged { identity, path, parent, keeps_name }) => {
                let (hex, kind) = (to_hex(*identity), if *keeps_name { KEEPING } else { "coalesce" });
                format!("{kind}\nidentity {hex}\nlayer {}\nparent {}\n", text_of(path)?, text_of(parent)?)
            }
            Self::Flatten => "flatten\n".to_owned(),
            Self::Move(Move { to, format, deletes_source, keeps_chain, stays, has_no_mark, id }) => {
                let yes = |yes: &bool| if *yes { "yes" } else { "no" };
                let (to, delete, stay, unmarked) =
                    (text_of_place(to)?, yes(deletes_source), yes(stays), yes(has_no_mark));
                let id = id.map(|id| format!(" {}", to_hex(id))).unwrap_or_default();
                let chain = if *keeps_chain { KEEPS_CHAIN } else { "" };
                let head = format!("move{id}\nto {to}\nformat {format}\ndelete {delete}\nstay {stay}\n");
                format!("{head}unmarked {unmarked}\n{chain}{}", if *keeps_chain { "\n" } else { "" })
            }
        })
    }

    fn from_lines<'a>(lines: &mut Peekable<impl Iterator<Item = &'a str>>) -> Option<Self> {
        let mut next = |before: &str| lines.next()?.strip_prefix(before);
        match next("")? {
            "flatten" => Some(Self::Flatten),
            kind @ ("coalesce" | KEEPING) => {
                let identity = Identity(from_hex(next("identity ")?)?);
                let (path, parent) = (next("layer ")?.into(), next("parent ")?.into());
                Some(Self::Coalesce(Merged { identity, path, parent, keeps_name: kind == KEEPING }))
            }
            kind => {
                let id = match kind.strip_prefix("move")? {
                    "" => None,
                    id => Some(Identity(from_hex(id.strip_prefix(' ')?)?)),
                };
                let yes = |text: &str| if text == "yes" { Some(true) } else { (text == "no").then_some(false) };
                let (to, format) = (next("to ")?.parse().ok()?, next("format ")?.parse().ok()?);
                let (deletes_source, stays) = (yes(next("delete ")?)?, yes(next("stay ")?)?);
                let has_no_mark = yes(next("unmarked ")?)?;
                let keeps_chain = lines.next_if_eq(&KEEPS_CHAIN).is_some();
                Some(Self::Move(Move { to, format, deletes_source, keeps_chain, stays, has_no_mark, id }))
            }
        }
    }

    /// What the note of `disk` says that the job does, if there is a note.
    ///
    /// # Errors
    /// As [`Note::read`].
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        Ok(Note::read(files, disk).await?.map(|note| note.plan))
    }

    /// Removes the note of `disk`.
    ///
    /// # Errors
    /// The system's.
    pub async fn remove<F: Files>(files: &F, disk: &Path) -> Result<()> {
        match files.remove(&names::job(disk)).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Removes the note of `disk`, if it is that of this job.
    ///
    /// # Errors
    /// As [`Note::read`]; the system's.
    pub(crate) async fn remove_own<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        match Self::read(files, disk).await? {
            Some(there) if there == *self => Self::remove(files, disk).await,
            // Also of a file that Spile has not made.
            _ => Ok(()),
        }
    }

    fn is_unfinished(&self, disk: &Path) -> Error {
        let what = match self {
            Self::Coalesce(merged) => format!("a merge of {} was begun and is not finished", merged.path.display()),
            Self::Flatten => "a flatten was begun and is not finished".to_owned(),
            Self::Move(to) => format!("a move to {} was begun and is not finished", to.to),
        };
        let hint = format!(
            "finish that first: the same command goes on with it; or give it up: `spile job {} cancel`",
            disk.display()
        );
        Error::new(ErrorKind::Busy, what).at_path(disk).hint(hint)
    }
}

impl Wishes {
    fn to_lines(self) -> String {
        let rate = self.limit_bytes_per_s.map(|rate| format!("rate {rate}\n")).unwrap_or_default();
        format!("{}{rate}", if self.is_paused { "paused\n" } else { "" })
    }

    fn from_lines<'a>(lines: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut wishes = Self::default();
        for line in lines {
            match line.strip_prefix("rate ") {
                Some(rate) => wishes.limit_bytes_per_s = Some(rate.parse().ok()?),
                None if line == "paused" => wishes.is_paused = true,
                None => return None,
            }
        }
        Some(wishes)
    }
}

impl Note {
    /// The note of a job that begins. `of` is as [`Note::of`].
    pub fn new(plan: Plan, wishes: Wishes, of: Option<Identity>) -> Self {
        Self { plan, wishes, of, copied: None, there: None }
    }

    fn to_text(&self) -> Result<String> {
        let of = self.of.map(|of| format!("of {}\n", to_hex(of))).unwrap_or_default();
        let copied = self.copied.as_ref().map(|Copied { until_bytes, half }| format!("copied {until_bytes} {half}\n"));
        let (plan, copied) = (self.plan.to_lines()?, copied.unwrap_or_default());
        let there = self.there.map(|there| format!("there {}\n", there.name())).unwrap_or_default();
        Ok(format!("{HEAD}\n{plan}{of}{copied}{there}{}{END}\n", self.wishes.to_lines()))
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines().peekable();
        lines.next().filter(|head| *head == HEAD)?;
        let plan = Plan::from_lines(&mut lines)?;
        let of = match lines.next_if(|line| line.starts_with("of ")) {
            Some(line) => Some(Identity(from_hex(&line[3..])?)),
            None => None,
        };
        let copied = match lines.next_if(|line| line.starts_with("copied ")) {
            Some(line) => {
                let (until, half) = line[7..].split_once(' ')?;
                Some(Copied { until_bytes: until.parse().ok()?, half: half.to_owned() })
            }
            None => None,
        };
        let there = match lines.next_if(|line| line.starts_with("there ")) {
            Some(line) => Some([There::TakenIn, There::Naming].into_iter().find(|there| there.name() == &line[6..])?),
            None => None,
        };
        Some(Self { plan, wishes: Wishes::from_lines(lines)?, of, copied, there })
    }

    /// False when the note was written for another image than `leaf`, which lay at the same path.
    pub fn is_of(&self, leaf: Option<Identity>) -> bool {
        match (self.of, leaf) {
            (Some(of), Some(leaf)) => of == leaf,
            _ => true,
        }
    }

    /// Writes the note of `disk`, durably, unless there is one of the same job. One that was left of another disk of that name goes.
    ///
    /// # Errors
    /// `Busy` when there is a note of another job; `Unsupported` for paths that a note cannot hold; the system's.
    pub(crate) async fn write<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        match Self::read(files, disk).await? {
            Some(there) if !there.is_of(self.of) => self.put(files, disk).await,
            Some(there) if there.plan == self.plan => Ok(()),
            Some(there) => Err(there.plan.is_unfinished(disk)),
            None => self.write_at(files, &names::job(disk)).await,
        }
    }

    /// Puts this note in the place of the one of `disk` that is there, in one step.
    ///
    /// # Errors
    /// The system's.
    pub(crate) async fn replace<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        let Some(there) = Self::read(files, disk).await? else { return Ok(()) };
        // Which disk it is, the job knew when it began.
        let new = Self { of: there.of, copied: there.copied.clone(), there: there.there, ..self.clone() };
        if new == there { Ok(()) } else { new.put(files, disk).await }
    }

    /// Says in the note of `disk`, if it is that of `plan`, how far the copy is. Durable when it returns.
    ///
    /// # Errors
    /// The system's: the note says this then, or what it said before.
    pub(crate) async fn say_copied<F: Files>(
        files: &F,
        disk: &Path,
        plan: &Plan,
        copied: Option<Copied>,
    ) -> Result<()> {
        match Self::read(files, disk).await? {
            Some(there) if there.plan == *plan && there.copied != copied => {
                Self { copied, ..there }.put(files, disk).await
            }
            _ => Ok(()),
        }
    }

    /// Says in the note of `disk`, if it is that of `plan`, that the job does `then` from now on: then this is true. A copy that is to get its name gets it by the plan that has made it.
    /// Durable when it returns.
    ///
    /// # Errors
    /// As [`Note::say_copied`].
    pub(crate) async fn say_plan<F: Files>(files: &F, disk: &Path, plan: &Plan, then: Plan) -> Result<bool> {
        match Self::read(files, disk).await? {
            Some(note) if note.plan == *plan && note.there != Some(There::Naming) => {
                Self { plan: then, ..note }.put(files, disk).await?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Says in the note of `disk`, if it is that of `plan`, what the other host has done. Durable when it returns.
    ///
    /// # Errors
    /// As [`Note::say_copied`].
    pub(crate) async fn say_there<F: Files>(files: &F, disk: &Path, plan: &Plan, there: There) -> Result<()> {
        match Self::read(files, disk).await? {
            Some(note) if note.plan == *plan && note.there != Some(there) => {
                Self { there: Some(there), ..note }.put(files, disk).await
            }
            _ => Ok(()),
        }
    }

    async fn put<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        let new = names::new_job(disk);
        remove_if_there(files, &new).await?;
        self.write_at(files, &new).await?;
        files.rename(&new, &names::job(disk)).await
    }

    async fn write_at<F: Files>(&self, files: &F, path: &Path) -> Result<()> {
        write_text(files, path, &self.to_text()?).await
    }

    /// The note of `disk`, if there is one that is understood. Nothing is changed.
    ///
    /// # Errors
    /// The system's.
    pub async fn look<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        Ok(read_text(files, &names::job(disk)).await?.and_then(|text| Self::from_text(&text)))
    }

    /// The note of `disk`, if there is one. What is left of one that was not written to its end is removed.
    ///
    /// # Errors
    /// `Unsupported` for a note of another version; the system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        let path = names::job(disk);
        let Some(text) = read_text(files, &path).await? else { return Ok(None) };
        match Self::from_text(&text) {
            Some(note) => Ok(Some(note)),
            None if is_of_another_version(&text) => {
                let what = "another version of Spile has begun a job on the disk and written this note of it";
                let hint = "go on with that version; or remove the note: what the job has done stays done";
                Err(Error::new(ErrorKind::Unsupported, what).at_path(&path).hint(hint))
            }
            None => files.remove(&path).await.map(|()| None),
        }
    }
}

/// True for a note that was written to its end, or has another first line, and then nobody here knows how it ends.
fn is_of_another_version(text: &str) -> bool {
    match text.split_once('\n') {
        Some((HEAD, lines)) => lines.ends_with(&format!("\n{END}\n")),
        Some((head, _)) => head.starts_with(ANY_HEAD),
        None => false,
    }
}

/// `place` as a line of a note.
pub(crate) fn text_of_place(place: &Locator) -> Result<String> {
    match place {
        Locator::Path(path) => text_of(path).map(str::to_owned),
        other => Ok(other.to_string()),
    }
}

/// `path` as a line of a note.
pub(crate) fn text_of(path: &Path) -> Result<&str> {
    let text = path.to_str().filter(|text| !text.contains('\n'));
    text.ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            "a job cannot name an image whose path is not UTF-8, or has a line end in it",
        )
        .at_path(path)
        .hint("rename the image, or its folder")
    })
}

/// Writes a new file at `path`, durably.
pub(crate) async fn write_text<F: Files>(files: &F, path: &Path, text: &str) -> Result<()> {
    let store = files.create(path, 0).await?;
    store.write_at(StoreOffset(0), &Segments::copied(text.as_bytes()), Via::Cached).await?;
    store.sync().await
}

/// True when there is a note at `path`: a file of that name that Spile has not made is none.
pub(crate) async fn is_there<F: Files>(files: &F, path: &Path) -> Result<bool> {
    Ok(files.open_own(path, OpenMode::ReadOnly, None).await?.is_some())
}

/// What the note at `path` says; `None` when there is none, or one that is not Spile's.
pub(crate) async fn read_text<F: Files>(files: &F, path: &Path) -> Result<Option<String>> {
    let Some(store) = files.open_own(path, OpenMode::ReadOnly, None).await? else { return Ok(None) };
    if store.len_bytes() > MOST_BYTES {
        let what =
            format!("this is no note of Spile's: it has {} bytes, and none has over {MOST_BYTES}", store.len_bytes());
        return Err(Error::new(ErrorKind::InvalidInput, what).at_path(path).hint("look whose it is, and remove it"));
    }
    let bytes = Segments::zeroed(store.len_bytes() as usize);
    if !bytes.is_empty() {
        store.read_at(StoreOffset(0), &bytes, Via::Cached).await?;
    }
    Ok(Some(String::from_utf8_lossy(&bytes.to_vec()).into_owned()))
}

pub(crate) fn to_hex(identity: Identity) -> String {
    identity.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let digits = text.as_bytes();
    if digits.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use spile_image::Format;

    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        let merged = |keeps_name| Merged {
            identity: Identity([0xa7; 16]),
            path: "/vm/a b.vhd".into(),
            parent: "/base/p.vhd".into(),
            keeps_name,
        };
        let wishes = Wishes { is_paused: true, limit_bytes_per_s: Some(7 << 20) };
        let to = Move {
            to: Locator::Path("/new/c d.raw".into()),
            format: Format::Raw,
            deletes_source: true,
            keeps_chain: false,
            stays: false,
            has_no_mark: true,
            id: None,
        };
        let away = Move { to: Locator::Nbd("nbd://h/x".to_owned()), id: Some(Identity([0x3c; 16])), ..to.clone() };
        let whole = Move { keeps_chain: true, ..to.clone() };
        let moves = [to, whole, away].map(|to| (Plan::Move(to), Wishes::default()));
        let merges = [true, false].map(|keeps_name| (Plan::Coalesce(merged(keeps_name)), wishes));
        let plans = merges.into_iter().chain([(Plan::Flatten, Wishes::default())]).chain(moves);
        for (plan, wishes) in plans {
            let of = (plan == Plan::Flatten).then_some(Identity([0x5e; 16]));
            let copied = of.map(|_| Copied { until_bytes: 7 << 30, half: "12 34".to_owned() });
            let there = of.map(|_| There::Naming);
            let note = Note { plan, wishes, of, copied, there };
            let text = note.to_text().unwrap();
            assert_eq!(Note::from_text(&text).as_ref(), Some(&note));
            assert!(note.is_of(None) && note.is_of(of) && note.is_of(Some(Identity([0; 16]))) == of.is_none());
            for len in 0..text.len() {
                let part = &text[..len];
                assert_eq!((Note::from_text(part), is_of_another_version(part)), (None, false), "{part:?}");
            }
        }
        let bent =
            Merged { identity: Identity([0; 16]), path: "/vm/a\nb.vhd".into(), parent: "/p".into(), keeps_name: false };
        assert_eq!(Plan::Coalesce(bent).to_lines().unwrap_err().kind(), ErrorKind::Unsupported);
    }
    #[test]
    fn a_note_of_another_version_is_left_alone() {
        for text in ["spile job 2\nbackup", "spile job 1\nbackup\nend\n", "spile job 1\nflatten\nslowly\nend\n"] {
            assert!(Note::from_text(text).is_none() && is_of_another_version(text), "{text:?}");
        }
        for text in ["", "spile job 1", "spile job 1\nflatten\n", "\0\0\0\0", "another text\n"] {
            assert!(Note::from_text(text).is_none() && !is_of_another_version(text), "{text:?}");
        }
    }
}
