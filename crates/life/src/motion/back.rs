//! [`CameFrom`]: the way back of a disk that was moved. Its old image, where it is kept, lacks only what has changed since, which is noted beside the new one under the
//! name [`BACK`]. A move to where the disk came from takes the old image up as its half: as if it had copied all of it before.
//!
//! The old image is taken up only when nobody has written to it, or to its parents, since it was left, and when what has changed since is known. From then
//! on it is half an image like any other, under a hidden name: the disk is where it is until the hand-over.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Files, Locator, OpenMode, Result};
use spile_image::layer::Identity;
use spile_image::{Broken, Format};

use super::note::is_free;
use super::order::{self, Order};
use super::pauses::Pauses;
use super::place::{Place, name_of_half, remove_half};
use super::progress::{MARK, Progress, forget_marks};
use super::received::Received;
use super::status::Status;
use super::{Move, old_image};
use crate::jobs::Plan;
use crate::jobs::note::{Copied, Note, There, from_hex, read_text, text_of, to_hex, write_text};
use crate::names;
use crate::snapshot::remove_if_there;
use crate::work::{Marks, Work};

/// What has changed since the disk came is noted under this name. No user can give it.
pub(super) const BACK: &str = "\u{1}back";

/// The names of checkpoints that no user sees, since which is known what has changed of a disk that has come from another host, begin so. The identity of the move
/// follows.
pub(crate) const BACK_THERE: &str = "\u{1}back-";

/// Under this name is noted what has changed of a disk since it came from another host by the move `id`.
pub(super) fn back_there(id: Identity) -> String {
    format!("{BACK_THERE}{}", to_hex(id))
}

/// The note beside a disk that was moved: where it was, and what its old image was left like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CameFrom {
    /// The path that the disk had.
    pub from: PathBuf,
    /// The format of its old image, which is at [`old_image`] of that path.
    pub format: Format,
    /// The size of the disk then.
    pub size_bytes: u64,
    /// What the images looked like, in the words of [`Marks::look`](crate::Marks::look).
    pub look: String,
    /// The parents of the old image.
    pub parents: Vec<PathBuf>,
}

const HEAD: &str = "spile came 1";
const END: &str = "end";

impl CameFrom {
    fn to_text(&self) -> Result<String> {
        let Self { from, format, size_bytes, look, parents } = self;
        let parents: Result<Vec<_>> = parents.iter().map(|path| Ok(format!("parent {}\n", text_of(path)?))).collect();
        let (from, parents) = (text_of(from)?, parents?.concat());
        Ok(format!("{HEAD}\nfrom {from}\nformat {format}\nsize {size_bytes}\nlook {look}\n{parents}{END}\n"))
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines();
        lines.next().filter(|head| *head == HEAD)?;
        let mut next = |before: &str| lines.next()?.strip_prefix(before);
        let (from, format) = (next("from ")?.into(), next("format ")?.parse().ok()?);
        let size_bytes = next("size ")?.parse().ok()?;
        let look = next("look ")?.to_owned();
        let parents = lines.map(|line| line.strip_prefix("parent ").map(PathBuf::from)).collect::<Option<_>>()?;
        Some(Self { from, format, size_bytes, look, parents })
    }

    /// The note of the disk at `disk`, if there is one that makes sense.
    ///
    /// # Errors
    /// The system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        Ok(read_text(files, &names::came(disk)).await?.and_then(|text| Self::from_text(&text)))
    }

    async fn write<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        let new = names::new_came(disk);
        remove_if_there(files, &new).await?;
        write_text(files, &new, &self.to_text()?).await?;
        files.rename(&new, &names::came(disk)).await
    }

    /// Notes beside the disk, which is at `to` now, what its old image is like. Nobody has that open, and all of it is durable.
    ///
    /// # Errors
    /// The system's.
    pub(super) async fn note<F: Files>(mut self, work: &Work<'_, F>, to: &Path) -> Result<()> {
        let Some(marks) = work.marks else { return Ok(()) };
        match marks.look(&self.images()).await? {
            Some(look) => self.look = look,
            None => return Ok(()),
        }
        self.write(work.files, to).await
    }

    /// The old image and its parents.
    pub(super) fn images(&self) -> Vec<PathBuf> {
        [old_image(&self.from)].into_iter().chain(self.parents.iter().cloned()).collect()
    }
}

/// The note that a disk leaves which has gone to another host: by which move, and what its old image was left like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// The move.
    pub id: Identity,
    /// The old image; where the disk came from is where it has left.
    pub image: CameFrom,
}

impl Left {
    fn to_text(&self) -> Result<String> {
        Ok(format!("move {}\n{}", to_hex(self.id), self.image.to_text()?))
    }

    fn from_text(text: &str) -> Option<Self> {
        let (id, image) = text.strip_prefix("move ")?.split_once('\n')?;
        Some(Self { id: Identity(from_hex(id)?), image: CameFrom::from_text(image)? })
    }

    /// The note at the path that the disk had, if there is one that makes sense.
    ///
    /// # Errors
    /// The system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        Ok(read_text(files, &names::left(disk)).await?.and_then(|text| Self::from_text(&text)))
    }

    /// Notes what the old image is like. Nobody has that open, and all of it is durable.
    ///
    /// # Errors
    /// The system's.
    pub async fn note<F: Files>(mut self, work: &Work<'_, F>) -> Result<()> {
        let Some(marks) = work.marks else { return Ok(()) };
        let Some(look) = marks.look(&self.image.images()).await? else { return Ok(()) };
        self.image.look = look;
        let new = names::new_left(&self.image.from);
        remove_if_there(work.files, &new).await?;
        write_text(work.files, &new, &self.to_text()?).await?;
        work.files.rename(&new, &names::left(&self.image.from)).await
    }
}

/// For so long a host is asked that says neither yes nor no.
const PATIENCE: Duration = Duration::from_secs(30);

/// Gives `order`, which is [`Order::Back`], until the answer is known: whether the old image is the half of this move now.
///
/// # Errors
/// `TimedOut` when the other host says neither; `Shutdown` when the job is told to end.
async fn is_given_back<F: Files>(work: &Work<'_, F>, order: &Locator, status: &Arc<Status>) -> Result<bool> {
    let (pauses, begun_ns) = (Pauses::new(), work.timer.now_ns());
    loop {
        let error = match order::give(work.files, order).await {
            Ok(()) => return Ok(true),
            Err(error) if order::is_refused_there(&error) => return Ok(false),
            Err(error) => error,
        };
        if work.timer.now_ns().saturating_sub(begun_ns) > PATIENCE.as_nanos() as u64 {
            let what = "the other host does not say whether the old image that the disk has left there can be used";
            let hint = "nothing is lost: begin the move again when that host answers";
            return Err(Error::new(ErrorKind::TimedOut, what).caused_by(error).hint(hint));
        }
        work.job.set_status(status.clone());
        status.note_failure(error.to_string());
        pauses.pass(work).await?;
    }
}

/// As [`take_old_image`], of a disk that goes back to the host that it has come from: that host is asked whether the old image is as it was left.
///
/// # Errors
/// `TimedOut` when that host does not answer; the system's.
pub(super) async fn take_there<F: Files>(
    work: &Work<'_, F>,
    plan: &Move,
    place: &mut Place,
    size_bytes: u64,
    (progress, status): (&Progress, &Arc<Status>),
) -> Result<Option<Copied>> {
    let (Some(id), Some(marks), Format::Raw, false) = (plan.id, work.marks, plan.format, plan.stays) else {
        return Ok(None);
    };
    for name in marks.names().await? {
        let Some(of) = name.strip_prefix(BACK_THERE).and_then(from_hex).map(Identity) else { continue };
        if marks.changed(&name, 0..0).await?.is_none() {
            continue;
        }
        let Some(order) = (Order::Back { id, of, size_bytes }).locator(&plan.to) else { return Ok(None) };
        // While the answer is not known, that host is told nothing more: what it has taken up, and nobody has written to, the next move back finds.
        if !is_given_back(work, &order, status).await? {
            continue;
        }
        // From now on that is a half of this move, which is dropped when the move fails, or filled from its begin. It has the parents that it had.
        place.be_taken_in(id);
        match marks.rename(&name, MARK).await {
            Ok(()) => {}
            // It is no empty child of the parents that would be sent now.
            Err(error) if place.sends_parents() => return Err(error),
            Err(_) => continue,
        }
        // In this order: a note that says what is copied says, too, that only `spile receive` has it; and it finds marks that are these.
        if let Some(disk) = &place.disk {
            Note::say_there(work.files, disk, &Plan::Move(plan.clone()), There::TakenIn).await?;
        }
        let copied = Copied { until_bytes: size_bytes, half: to_hex(id) };
        progress.say(work, &copied).await?;
        return Ok(Some(copied));
    }
    Ok(None)
}

/// Forgets what was noted of the changes of the disk at `disk`, which has no job, for a move that is over, or for a way back to an old image that is gone.
///
/// # Errors
/// The system's.
pub async fn forget_what_is_over<F: Files>(files: &F, disk: &Path, marks: &dyn Marks) -> Result<()> {
    forget_marks(marks).await?;
    // Whoever removes the note of how the disk came does not want the way back. Nor does it help any more when all counts as changed.
    let came = Received::read(files, disk).await?.map(|note| back_there(note.id));
    for name in marks.names().await?.into_iter().filter(|name| name.starts_with(BACK_THERE)) {
        if came.as_ref() != Some(&name) || marks.changed(&name, 0..0).await?.is_none() {
            marks.end(&name).await?;
        }
    }
    let image = CameFrom::read(files, disk).await?.map(|came| old_image(&came.from));
    if let Some(image) = &image
        && !is_free(files, image).await
    {
        return Ok(());
    }
    marks.end(BACK).await?;
    remove_if_there(files, &names::came(disk)).await
}

/// Takes the old image of the disk at `disk` up as the half of the move `plan`, when that goes to where it came from: what the job's note says of it then.
/// `None` when there is no such image, or more has happened to it or to the disk than is known.
///
/// # Errors
/// The system's.
pub(super) async fn take_old_image<F: Files>(
    work: &Work<'_, F>,
    disk: &Path,
    plan: &Move,
    size_bytes: u64,
    progress: &Progress,
) -> Result<Option<Copied>> {
    let (Locator::Path(to), Some(marks), false) = (&plan.to, work.marks, plan.stays) else { return Ok(None) };
    let came = CameFrom::read(work.files, disk).await?;
    let Some(came) =
        came.filter(|came| came.from == *to && came.format == plan.format && came.size_bytes == size_bytes)
    else {
        return Ok(None);
    };
    let (image, half) = (old_image(to), names::moving(to));
    // Whoever has it open for writing may write to it, and nobody can open it so now. To open it for writing here would change how it looks.
    let store = match work.files.open(&Locator::from(&image), OpenMode::ReadOnly).await {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy) => return Ok(None),
        opened => opened?,
    };
    let is_known = marks.changed(BACK, 0..0).await?.is_some();
    let is_as_left = marks.look(&came.images()).await?.is_some_and(|look| look == came.look);
    let is_as_left = is_as_left || work.broken == Broken::OldImageAsIs;
    let (Some(name), true) = (name_of_half(&store), is_known && is_as_left) else { return Ok(None) };
    remove_half(work.files, &half).await?;
    work.files.rename_file((&store, &image), (&half, None)).await?;
    drop(store);
    // In this order: a note that says so finds a half and marks that are these.
    marks.rename(BACK, MARK).await?;
    let copied = Copied { until_bytes: size_bytes, half: name };
    progress.say(work, &copied).await?;
    remove_if_there(work.files, &names::came(disk)).await?;
    Ok(Some(copied))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        let parents = vec![PathBuf::from("/vm/p q.vhd"), "/base/r.vhd".into()];
        let came = CameFrom {
            from: "/vm/a b.vhd".into(),
            format: Format::Vhd,
            size_bytes: 9 << 30,
            look: "1 2".to_owned(),
            parents,
        };
        for came in [CameFrom { parents: Vec::new(), ..came.clone() }, came] {
            let text = came.to_text().unwrap();
            assert_eq!(CameFrom::from_text(&text).as_ref(), Some(&came));
            for len in 0..text.len() {
                assert_eq!(CameFrom::from_text(&text[..len]), None, "{:?}", &text[..len]);
            }
            let left = Left { id: Identity([0x3b; 16]), image: came };
            assert_eq!(Left::from_text(&left.to_text().unwrap()), Some(left));
            assert_eq!(Left::from_text(&text), None);
        }
    }
}
