//! The nodes, and their permissions.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use spile_xen::DomId;
use spile_xen::store::wire::MAX_PATH_BYTES;
use spile_xen::store::{Access, Permission};

/// The longest path that a guest may give relative to its own folder.
const MAX_RELATIVE_BYTES: usize = 2048;

/// A node.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub value: Vec<u8>,
    pub children: BTreeSet<String>,
    /// The permissions, the owner's first; never empty.
    pub permissions: Vec<Permission>,
    /// A number that is new after every change.
    pub generation: u64,
}

/// The kinds of access to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Read,
    Write,
}

impl Node {
    pub fn owner(&self) -> DomId {
        self.permissions[0].domain
    }

    /// True when a domain has this access. Domain 0 and the owner have every access.
    pub fn allows(&self, who: DomId, need: Need) -> bool {
        if who == DomId(0) || who == self.owner() {
            return true;
        }
        let named = self.permissions[1..].iter().find(|entry| entry.domain == who);
        let access = named.unwrap_or(&self.permissions[0]).access;
        if need == Need::Read { access.can_read() } else { access.can_write() }
    }
}

/// All nodes, by their paths.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<String, Arc<Node>>,
    generation: u64,
    /// The number of nodes that each domain owns.
    owned: HashMap<DomId, usize>,
}

impl Tree {
    /// A tree with only the root, which every domain may read.
    pub fn new() -> Self {
        let mut tree = Self { nodes: HashMap::new(), generation: 0, owned: HashMap::new() };
        let permissions = vec![Permission { domain: DomId(0), access: Access::Read }];
        tree.put("/", Some(Node { value: Vec::new(), children: BTreeSet::new(), permissions, generation: 0 }));
        tree
    }

    pub fn get(&self, path: &str) -> Option<&Arc<Node>> {
        self.nodes.get(path)
    }

    /// Sets or removes one node. The caller must keep the list of names in the node above right.
    pub fn put(&mut self, path: &str, node: Option<Node>) {
        self.generation += 1;
        let before = match node {
            Some(mut node) => {
                node.generation = self.generation;
                *self.owned.entry(node.owner()).or_default() += 1;
                self.nodes.insert(path.to_owned(), Arc::new(node))
            }
            None => self.nodes.remove(path),
        };
        if let Some(before) = before
            && let Some(count) = self.owned.get_mut(&before.owner())
        {
            *count -= 1;
        }
    }

    /// The number of nodes that a domain owns.
    pub fn owned(&self, domain: DomId) -> usize {
        self.owned.get(&domain).copied().unwrap_or(0)
    }
}

/// The whole path that `given` means for a domain, when it is one.
pub(super) fn absolute(given: &[u8], who: DomId) -> Option<String> {
    let text = std::str::from_utf8(given).ok()?;
    let is_absolute = text.starts_with('/');
    let limit = if is_absolute { MAX_PATH_BYTES } else { MAX_RELATIVE_BYTES };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte);
    let is_path = !text.is_empty() && text.len() <= limit && text.bytes().all(is_name);
    let path = if is_absolute { text.to_owned() } else { format!("{}/{text}", home(who)) };
    let is_proper = path == "/" || !path.ends_with('/') && !path.contains("//");
    (is_path && is_proper).then_some(path)
}

/// The folder of a domain's own nodes.
pub(super) fn home(domain: DomId) -> String {
    format!("/local/domain/{domain}")
}

/// The path above, and the last name; `None` for the root.
pub(super) fn parent(path: &str) -> Option<(&str, &str)> {
    if path == "/" {
        return None;
    }
    let (above, name) = path.rsplit_once('/')?;
    Some((if above.is_empty() { "/" } else { above }, name))
}

/// The path of a child.
pub(super) fn child(path: &str, name: &str) -> String {
    if path == "/" { format!("/{name}") } else { format!("{path}/{name}") }
}

/// True when `path` is `above` or below it.
pub(super) fn is_at_or_below(path: &str, above: &str) -> bool {
    match path.strip_prefix(above) {
        Some(rest) => above == "/" || rest.is_empty() || rest.starts_with('/'),
        None => false,
    }
}
