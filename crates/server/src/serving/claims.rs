//! Who changes a disk's images. Only one change at a time: a snapshot, a merge and a new size would each work on a chain that another one
//! is about to replace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spile_core::{Error, ErrorKind, Result};

/// The changes that are under way, by the names of their disks. Clones are the same list.
#[derive(Clone, Default)]
pub struct Claims(Arc<Mutex<BTreeMap<String, String>>>);

/// Keeps other changes away from some disks until it is dropped. It may be dropped on any thread.
pub struct Claim {
    claims: Claims,
    names: Vec<String>,
}

impl Claims {
    /// Claims all of these disks, or none. `what` says for what, for others' messages: `a snapshot`.
    ///
    /// # Errors
    /// `Busy`, saying what is done to which disk.
    pub fn take(&self, names: &[String], what: &str) -> Result<Claim> {
        let mut list = self.list();
        if let Some((name, other)) = names.iter().find_map(|name| list.get_key_value(name)) {
            return Err(busy(name, other));
        }
        list.extend(names.iter().map(|name| (name.clone(), what.to_owned())));
        drop(list);
        Ok(Claim { claims: self.clone(), names: names.to_vec() })
    }

    /// Refuses what cannot go together with any change of images.
    ///
    /// # Errors
    /// `Busy`, as [`Claims::take`].
    pub fn refuse_any(&self) -> Result<()> {
        self.list().iter().next().map_or(Ok(()), |(name, what)| Err(busy(name, what)))
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut list = self.claims.list();
        self.names.iter().for_each(|name| drop(list.remove(name)));
    }
}

impl Claim {
    /// A claim for each of its disks, in their order.
    pub fn split(mut self) -> Vec<Self> {
        let names = std::mem::take(&mut self.names);
        names.into_iter().map(|name| Self { claims: self.claims.clone(), names: vec![name] }).collect()
    }
}

fn busy(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{what} of the disk {name:?} is under way")).hint("try again when it has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_changed_by_one_at_a_time() {
        let claims = Claims::default();
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let one = claims.take(&names(&["a", "b"]), "a snapshot").unwrap();
        let refused = claims.take(&names(&["c", "b"]), "a merge").err().unwrap();
        assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains("a snapshot of the disk \"b\""));
        // Nothing of a refused claim is left.
        let other = claims.take(&names(&["c"]), "a merge").unwrap();
        drop(one);
        claims.take(&names(&["a", "b"]), "a merge").unwrap();
        assert!(claims.refuse_any().is_err());
        drop(other);
        claims.refuse_any().unwrap();
        let mut each = claims.take(&names(&["a", "b"]), "a snapshot").unwrap().split();
        drop(each.remove(0));
        let _a = claims.take(&names(&["a"]), "a merge").unwrap();
        assert!(claims.take(&names(&["b"]), "a merge").is_err());
    }
}
