//! [`Quota`]: how many half-made images hosts may have here. Each takes two files and a name, and costs whoever asks for it nothing.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_front::Peer;
use spile_image::layer::Identity;

/// So many half-made images may lie in a folder.
const MOST_IN_ALL: usize = 256;
/// So many of them may be of one host, or of one process of this host.
const MOST_OF_PEER: usize = 128;
/// A half to which no link has come for so long is given up: whoever has begun it comes with one at once, or compares parents first.
pub(super) const ABANDONED: Duration = Duration::from_secs(600);
/// And for so long, when there is no place for another one.
pub(super) const ABANDONED_WHEN_FULL: Duration = Duration::from_secs(60);

/// The halves that were begun by orders to this process, by the disks' names.
#[derive(Default)]
pub(super) struct Quota(Mutex<HashMap<String, Begun>>);

struct Begun {
    id: Identity,
    peer: Peer,
    at: Instant,
    /// Something may have been written to it.
    is_used: bool,
}

impl Quota {
    fn begun(&self) -> MutexGuard<'_, HashMap<String, Begun>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a place for a new half to `peer`. There are `there` halves in the folder.
    ///
    /// # Errors
    /// `Exhausted`.
    pub fn reserve(&self, name: &str, id: Identity, peer: Peer, there: usize) -> Result<()> {
        let mut begun = self.begun();
        let of_peer = begun.iter().filter(|(other, half)| half.peer == peer && *other != name).count();
        let what = match (there, of_peer) {
            (MOST_IN_ALL.., _) => format!("{there} disks are on their way to this folder, as many as may be"),
            (_, MOST_OF_PEER..) => format!("{of_peer} disks are on their way from this host, as many as may be"),
            _ => {
                begun.insert(name.to_owned(), Begun { id, peer, at: Instant::now(), is_used: false });
                return Ok(());
            }
        };
        let hint = "wait until some have come; `spile receive DIR --list` shows them, and --remove NAME removes one that is given up";
        Err(Error::new(ErrorKind::Exhausted, what).hint(hint))
    }

    /// A link comes to the half: it is not given up any more unless somebody says so.
    pub fn note_used(&self, name: &str) {
        self.begun().entry(name.to_owned()).and_modify(|half| half.is_used = true);
    }

    /// The half is whole, or gone.
    pub fn forget(&self, name: &str) {
        self.begun().remove(name);
    }

    /// The disks whose halves nobody has used for `age`.
    pub fn abandoned(&self, age: Duration) -> Vec<String> {
        let begun = self.begun();
        begun.iter().filter(|(_, half)| half.is_abandoned(age)).map(|(name, _)| name.clone()).collect()
    }

    /// The move of the half of the disk `name`, if nobody has used it for `age`. It is not known any more.
    pub fn take_abandoned(&self, name: &str, age: Duration) -> Option<Identity> {
        let mut begun = self.begun();
        begun.get(name)?.is_abandoned(age).then_some(())?;
        begun.remove(name).map(|half| half.id)
    }
}

impl Begun {
    fn is_abandoned(&self, age: Duration) -> bool {
        !self.is_used && self.at.elapsed() >= age
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32) -> Peer {
        Peer::Process { uid: 0, pid }
    }

    #[test]
    fn each_peer_has_so_many_places_and_used_ones_are_not_given_up() {
        let (quota, id) = (Quota::default(), Identity([1; 16]));
        let reserve = |number: usize, peer| quota.reserve(&format!("d{number}"), id, peer, 0);
        (0..MOST_OF_PEER).for_each(|number| reserve(number, process(1)).unwrap());
        assert_eq!(reserve(MOST_OF_PEER, process(1)).unwrap_err().kind(), ErrorKind::Exhausted);
        reserve(MOST_OF_PEER, process(2)).unwrap();
        reserve(0, process(1)).expect("one that is begun again takes no other place");
        assert_eq!(quota.reserve("e", id, process(3), MOST_IN_ALL).unwrap_err().kind(), ErrorKind::Exhausted);
        quota.note_used("d7");
        quota.forget("d8");
        reserve(1000, process(1)).unwrap();
        assert!(quota.abandoned(ABANDONED).is_empty());
        let abandoned = quota.abandoned(Duration::ZERO);
        assert_eq!(abandoned.len(), MOST_OF_PEER);
        assert!(abandoned.iter().all(|name| name != "d7" && name != "d8"));
        assert_eq!(quota.take_abandoned("d7", Duration::ZERO), None);
        assert_eq!(quota.take_abandoned("d9", Duration::ZERO), Some(id));
        assert_eq!(quota.take_abandoned("d9", Duration::ZERO), None);
    }
}
