//! The note beside a disk that says which job is under way ([`names::job`]).
//!
//! It is written before the job changes anything, and removed after its last change. It says nothing about progress: that is
//! seen in the images. A note that was not written to its end says nothing, because then nothing had begun.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_image::layer::Identity;

use crate::names;

/// What a job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Merges a layer into its parent.
    Coalesce(Merged),
    /// Copies into the leaf what it lacks, so that it needs no parent.
    Flatten,
}

/// The layer that is merged away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Its identity.
    pub identity: Identity,
    /// Where it lay when the job began.
    pub path: PathBuf,
    /// Where its parent lay.
    pub parent: PathBuf,
}

/// The first line: a note of another form is left alone.
const HEAD: &str = "spile job 1";
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
        }
    }

    fn to_text(&self) -> Result<String> {
        let lines = match self {
            Self::Coalesce(Merged { identity, path, parent }) => {
                let hex: String = identity.0.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("coalesce\nidentity {hex}\nlayer {}\nparent {}", text_of(path)?, text_of(parent)?)
            }
            Self::Flatten => "flatten".to_owned(),
        };
        Ok(format!("{HEAD}\n{lines}\n{END}\n"))
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix(&format!("\n{END}\n"))?.lines();
        let mut next = |before: &str| lines.next()?.strip_prefix(before);
        next(HEAD)?;
        match next("")? {
            "flatten" => Some(Self::Flatten),
            "coalesce" => {
                let identity = Identity(from_hex(next("identity ")?)?);
                let (path, parent) = (next("layer ")?.into(), next("parent ")?.into());
                Some(Self::Coalesce(Merged { identity, path, parent }))
            }
            _ => None,
        }
    }

    /// Writes the note of `disk`, durably.
    ///
    /// # Errors
    /// `Busy` when there is a note of another job; `Unsupported` for paths that a note cannot hold; the system's.
    pub async fn write<F: Files>(&self, files: &F, disk: &Path) -> Result<()> {
        let (path, text) = (names::job(disk), self.to_text()?);
        match Self::read(files, disk).await? {
            Some(there) if there == *self => return Ok(()),
            Some(there) => return Err(there.is_unfinished(disk)),
            None => {}
        }
        let store = files.create(&path, 0).await?;
        store.write_at(StoreOffset(0), &Segments::copied(text.as_bytes()), Via::Cached).await?;
        store.sync().await
    }

    /// The note of `disk`, if there is one. What is left of one that was not written to its end is removed.
    ///
    /// # Errors
    /// The system's.
    pub async fn read<F: Files>(files: &F, disk: &Path) -> Result<Option<Self>> {
        let path = names::job(disk);
        let store = match files.open(&path.as_path().into(), OpenMode::ReadOnly).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let bytes = Segments::zeroed(store.len_bytes().min(MOST_BYTES) as usize);
        if !bytes.is_empty() {
            store.read_at(StoreOffset(0), &bytes, Via::Cached).await?;
        }
        drop(store);
        let plan = String::from_utf8(bytes.to_vec()).ok().and_then(|text| Self::from_text(&text));
        if plan.is_none() {
            files.remove(&path).await?;
        }
        Ok(plan)
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

    fn is_unfinished(&self, disk: &Path) -> Error {
        let what = match self {
            Self::Coalesce(merged) => format!("a merge of {} was begun and is not finished", merged.path.display()),
            Self::Flatten => "a flatten was begun and is not finished".to_owned(),
        };
        Error::new(ErrorKind::Busy, what).at_path(disk).hint("finish that first: the same command goes on with it")
    }
}

/// `path` as a line of a note.
fn text_of(path: &Path) -> Result<&str> {
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

fn from_hex(text: &str) -> Option<[u8; 16]> {
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
    use super::*;

    #[test]
    fn a_note_is_read_back_only_when_it_is_whole() {
        let merged =
            Merged { identity: Identity([0xa7; 16]), path: "/vm/a b.vhd".into(), parent: "/base/p.vhd".into() };
        for plan in [Plan::Coalesce(merged), Plan::Flatten] {
            let text = plan.to_text().unwrap();
            assert_eq!(Plan::from_text(&text), Some(plan));
            for len in 0..text.len() {
                assert_eq!(Plan::from_text(&text[..len]), None, "{:?}", &text[..len]);
            }
        }
        let bent = Merged { identity: Identity([0; 16]), path: "/vm/a\nb.vhd".into(), parent: "/p".into() };
        assert_eq!(Plan::Coalesce(bent).to_text().unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
