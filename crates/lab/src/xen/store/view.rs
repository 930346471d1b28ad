//! The tree as one request sees and changes it: within a transaction or without.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use rustix::io::Errno;
use spile_xen::DomId;
use spile_xen::store::Permission;

use super::tree::{Need, Node, Tree, child, parent};

/// Limits: nodes of a domain, bytes of a value, permissions of a node, and nodes that a transaction reads or changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quota {
    pub nodes: usize,
    pub value_bytes: usize,
    pub permissions: usize,
    pub transaction: usize,
}

impl Quota {
    pub fn of(who: DomId) -> Self {
        if who == DomId(0) {
            return Self { nodes: 1 << 18, value_bytes: usize::MAX, permissions: 64, transaction: 1 << 18 };
        }
        Self { nodes: 1000, value_bytes: 2048, permissions: 5, transaction: 4000 }
    }
}

/// A change of the tree, for watches.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub path: String,
    /// True for a node that was removed together with a node above it: only watches of this very path get an event.
    pub is_exact: bool,
    /// The node's permissions: a domain that may not read it gets no event.
    pub node: Arc<Node>,
}

/// The nodes that a transaction has read and changed.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// The generation of each node when it was first looked at; `None` when there was none.
    seen: HashMap<String, Option<u64>>,
    changed: HashMap<String, Option<Arc<Node>>>,
    events: Vec<Event>,
    /// The number of nodes that the transaction has made, less the number that it has removed.
    made: isize,
}

impl Transaction {
    /// True when the transaction has reached its limit. It can only end then.
    pub fn is_full(&self, who: DomId) -> bool {
        self.seen.len().max(self.events.len()) > Quota::of(who).transaction
    }

    /// Applies the changes to the tree and returns them, for watches. `None` when a node that the transaction has read was
    /// changed meanwhile.
    pub fn commit(self, tree: &mut Tree) -> Option<Vec<Event>> {
        let now = |path: &str| tree.get(path).map(|node| node.generation);
        if self.seen.iter().any(|(path, generation)| now(path) != *generation) {
            return None;
        }
        for (path, node) in self.changed {
            tree.put(&path, node.map(Arc::unwrap_or_clone));
        }
        Some(self.events)
    }
}

/// The tree as one request of the domain `who` sees it.
pub(super) struct View<'a> {
    pub tree: &'a mut Tree,
    pub transaction: Option<&'a mut Transaction>,
    pub who: DomId,
    /// The changes that watches are told of. Empty within a transaction: these are told at its end.
    pub events: Vec<Event>,
}

impl View<'_> {
    fn get(&mut self, path: &str) -> Option<Arc<Node>> {
        let node = self.tree.get(path);
        let Some(transaction) = &mut self.transaction else { return node.cloned() };
        if let Some(changed) = transaction.changed.get(path) {
            return changed.clone();
        }
        transaction.seen.entry(path.to_owned()).or_insert(node.map(|node| node.generation));
        node.cloned()
    }

    fn put(&mut self, path: &str, node: Option<Node>) {
        match &mut self.transaction {
            Some(transaction) => {
                transaction.changed.insert(path.to_owned(), node.map(Arc::new));
            }
            None => self.tree.put(path, node),
        }
    }

    fn tell(&mut self, path: &str, is_exact: bool, node: Arc<Node>) {
        let event = Event { path: path.to_owned(), is_exact, node };
        match &mut self.transaction {
            Some(transaction) => transaction.events.push(event),
            None => self.events.push(event),
        }
    }

    /// The node at a path, if `who` has that permission.
    pub fn find(&mut self, path: &str, need: Need) -> Result<Arc<Node>, Errno> {
        match self.get(path) {
            Some(node) if node.allows(self.who, need) => Ok(node),
            Some(_) => Err(Errno::ACCESS),
            None => Err(self.nothing_at(path, need)),
        }
    }

    /// The error for a node that does not exist. Only a domain that may use the node above learns that it does not exist.
    fn nothing_at(&mut self, path: &str, need: Need) -> Errno {
        let (_, above) = self.nearest(path);
        if above.allows(self.who, need) { Errno::NOENT } else { Errno::ACCESS }
    }

    /// The nearest existing node above a path.
    fn nearest(&mut self, path: &str) -> (String, Arc<Node>) {
        let mut at = path;
        while let Some((above, _)) = parent(at) {
            if let Some(node) = self.get(above) {
                return (above.to_owned(), node);
            }
            at = above;
        }
        let root = self.get("/").expect("the root is never removed");
        ("/".to_owned(), root)
    }

    /// Sets a value. Missing nodes are made.
    pub fn write(&mut self, path: &str, value: &[u8]) -> Result<(), Errno> {
        if value.len() > Quota::of(self.who).value_bytes {
            return Err(Errno::NOSPC);
        }
        self.set(path, |node| node.value = value.to_vec())
    }

    /// Makes a node, unless it exists.
    pub fn make(&mut self, path: &str) -> Result<(), Errno> {
        match self.find(path, Need::Write) {
            Err(Errno::NOENT) => self.set(path, |_| ()),
            other => other.map(drop),
        }
    }

    fn set(&mut self, path: &str, change: impl FnOnce(&mut Node)) -> Result<(), Errno> {
        let node = match self.find(path, Need::Write) {
            Err(Errno::NOENT) => {
                self.make_all(path)?;
                self.get(path)
            }
            other => Some(other?),
        };
        let mut node = Arc::unwrap_or_clone(node.ok_or(Errno::NOENT)?);
        change(&mut node);
        self.tell(path, false, Arc::new(node.clone()));
        self.put(path, Some(node));
        Ok(())
    }

    /// Makes the node, and all missing nodes above it.
    fn make_all(&mut self, path: &str) -> Result<(), Errno> {
        let (mut at, mut above) = self.nearest(path);
        let rest = path.strip_prefix(&at).unwrap_or_default().trim_start_matches('/').to_owned();
        let made = self.transaction.as_ref().map_or(0, |transaction| transaction.made);
        let names = rest.split('/').count();
        let owned = self.tree.owned(self.who).saturating_add_signed(made);
        if owned + names > Quota::of(self.who).nodes {
            return Err(Errno::NOSPC);
        }
        if let Some(transaction) = &mut self.transaction {
            transaction.made += names as isize;
        }
        for name in rest.split('/') {
            let mut with_name = Arc::unwrap_or_clone(above);
            with_name.children.insert(name.to_owned());
            let mut permissions = with_name.permissions.clone();
            if self.who != DomId(0) {
                permissions[0].domain = self.who;
            }
            self.put(&at, Some(with_name));
            at = child(&at, name);
            let node = Node { value: Vec::new(), children: BTreeSet::new(), permissions, generation: 0 };
            self.put(&at, Some(node.clone()));
            above = Arc::new(node);
        }
        Ok(())
    }

    /// Removes a node and all nodes below it. A missing node is no error if the node above it exists.
    pub fn remove(&mut self, path: &str) -> Result<(), Errno> {
        let Some((above, name)) = parent(path) else { return Err(Errno::INVAL) };
        match self.find(path, Need::Write) {
            Err(Errno::NOENT) if self.get(above).is_some() => return Ok(()),
            other => other?,
        };
        if let Some(node) = self.get(above) {
            let mut node = Arc::unwrap_or_clone(node);
            node.children.remove(name);
            self.put(above, Some(node));
        }
        let mut left = vec![path.to_owned()];
        while let Some(at) = left.pop() {
            let Some(node) = self.get(&at) else { continue };
            left.extend(node.children.iter().map(|name| child(&at, name)));
            self.put(&at, None);
            if let Some(transaction) = &mut self.transaction
                && node.owner() == self.who
            {
                transaction.made -= 1;
            }
            self.tell(&at, at != path, node);
        }
        Ok(())
    }

    /// Sets the permissions of a node. Only domain 0 may give a node to another domain.
    pub fn set_permissions(&mut self, path: &str, permissions: Vec<Permission>) -> Result<(), Errno> {
        if permissions.is_empty() {
            return Err(Errno::INVAL);
        }
        if permissions.len() > Quota::of(self.who).permissions {
            return Err(Errno::NOSPC);
        }
        let node = self.find(path, Need::Write)?;
        if self.who != DomId(0) && (self.who != node.owner() || self.who != permissions[0].domain) {
            return Err(Errno::PERM);
        }
        self.set(path, |node| node.permissions = permissions)
    }
}
