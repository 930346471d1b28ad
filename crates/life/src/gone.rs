//! The note beside an image that nobody needs as an image of its own any more ([`names::gone`]): its user has deleted it while it had one
//! child. What it holds goes on in that child, once they are merged.
//!
//! The note says which images both are ([`LayerInfo::which`](spile_image::LayerInfo::which)). It means nothing any more when another image has taken the name, or when the child is
//! another one by now: then it is not proven that nobody needs the image.

use std::path::Path;

use spile_core::{ErrorKind, Files, Locator, OpenMode, Result};
use spile_image::GraphLayer;
use spile_image::layer::Identity;

use crate::jobs::note::{from_hex, read_text, to_hex, write_text};
use crate::names;
use crate::snapshot::remove_if_there;

/// An image that was deleted while it had one child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Which image.
    pub identity: Identity,
    /// Which child it had.
    pub child: Identity,
    /// The merge of the child into it has begun: it may hold some of what the child holds, and is a snapshot no more.
    pub is_merged: bool,
}

/// The first line.
const HEAD: &str = "spile gone 1";
/// The line of [`Gone::is_merged`].
const MERGED: &str = "merged";
/// The last line: without it the note was not written to its end.
const END: &str = "end";

impl Gone {
    fn to_text(self) -> String {
        let merged = if self.is_merged { format!("{MERGED}\n") } else { String::new() };
        format!("{HEAD}\nidentity {}\nchild {}\n{merged}{END}\n", to_hex(self.identity), to_hex(self.child))
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines();
        lines.next().filter(|head| *head == HEAD)?;
        let identity = Identity(from_hex(lines.next()?.strip_prefix("identity ")?)?);
        let child = Identity(from_hex(lines.next()?.strip_prefix("child ")?)?);
        let is_merged = match lines.next() {
            None => false,
            Some(MERGED) if lines.next().is_none() => true,
            Some(_) => return None,
        };
        Some(Self { identity, child, is_merged })
    }

    /// Writes the note of `image`, durably, in the place of one that is there.
    ///
    /// # Errors
    /// The system's. No note is left then, if it can be removed.
    pub async fn write<F: Files>(self, files: &F, image: &Path) -> Result<()> {
        Self::remove(files, image).await?;
        let written = write_text(files, &names::gone(image), &self.to_text()).await;
        if written.is_err() {
            // Half a note says nothing, and would keep others from believing that the image is as it was.
            let _ = Self::remove(files, image).await;
        }
        written
    }

    /// Notes that the merge into `image` begins: [`unmark`](crate::delete::unmark) refuses from then on. False when the note is gone by now.
    ///
    /// # Errors
    /// `Busy` while somebody is about to remove it; the system's.
    pub(crate) async fn begin_merge<F: Files>(files: &F, asking: &F, image: &Path) -> Result<bool> {
        let Some(_alone) = Self::lock(files, image).await? else { return Ok(false) };
        let Some(gone) = Self::read(asking, image).await? else { return Ok(false) };
        if !gone.is_merged {
            let new = names::new_gone(image);
            remove_if_there(files, &new).await?;
            write_text(files, &new, &Self { is_merged: true, ..gone }.to_text()).await?;
            match files.rename(&new, &names::gone(image)).await {
                // Somebody has removed the note: its image has become another one.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                renamed => renamed?,
            }
        }
        Ok(true)
    }

    /// The note's file, which nobody else changes while it is open. `None` when there is none.
    ///
    /// # Errors
    /// `Busy` while somebody else does this; the system's.
    pub(crate) async fn lock<F: Files>(files: &F, image: &Path) -> Result<Option<F::Store>> {
        let path = names::gone(image);
        let store = match files.open(&Locator::from(&path), OpenMode::ReadWrite).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        Ok(files.is_at(&store, &path).await?.then_some(store))
    }

    /// The note of `image`; `None` when there is none, or none that is understood.
    ///
    /// # Errors
    /// The system's.
    pub async fn read<F: Files>(files: &F, image: &Path) -> Result<Option<Self>> {
        Ok(read_text(files, &names::gone(image)).await?.and_then(|text| Self::from_text(&text)))
    }

    /// The note of the image of `layer`, when it is of this very image.
    ///
    /// # Errors
    /// The system's.
    pub(crate) async fn of<F: Files>(files: &F, layer: &GraphLayer<F::Store>) -> Result<Option<Self>> {
        let which = layer.which();
        // A file that is known by its place only may be a copy, which is half merged, too.
        let may_be_copy = !layer.image().format().has_lasting_identities();
        let is_its = |gone: &Self| Some(gone.identity) == which || (gone.is_merged && may_be_copy);
        Ok(Self::read(files, layer.path()).await?.filter(is_its))
    }

    /// Removes the note of `image`, if there is one.
    ///
    /// # Errors
    /// The system's.
    pub async fn remove<F: Files>(files: &F, image: &Path) -> Result<()> {
        remove_if_there(files, &names::new_gone(image)).await?;
        remove_if_there(files, &names::gone(image)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        for is_merged in [false, true] {
            let gone = Gone { identity: Identity([0xa7; 16]), child: Identity([3; 16]), is_merged };
            let text = gone.to_text();
            assert_eq!(Gone::from_text(&text), Some(gone));
            for len in 0..text.len() {
                assert_eq!(Gone::from_text(&text[..len]), None, "{len}");
            }
            assert_eq!(Gone::from_text(&text.replace("gone 1", "gone 2")), None);
            assert_eq!(Gone::from_text(&text.replace("\nend", "\nmore\nend")), None);
        }
    }
}
