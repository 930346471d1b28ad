//! What the program shows now: the model, and what its user has chosen.

use std::time::Duration;

use super::model::{Key, Model};
use super::text::Ink;

/// What fills the terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum View {
    /// The list of disks.
    #[default]
    List,
    /// The layers of a disk.
    Layers(Key),
    /// The heat map of a disk's latencies.
    Heat(Key),
    /// The keys.
    Help,
}

/// The program's state.
#[derive(Debug)]
pub struct App {
    /// What was told of servers and disks.
    pub model: Model,
    /// What fills the terminal.
    pub view: View,
    /// The chosen disk.
    pub chosen: Option<Key>,
    /// The filter is being typed.
    pub typing: bool,
    /// The picture stays as it is.
    pub paused: bool,
    /// The first line of a panel that is shown.
    pub scroll: usize,
    /// The length of an interval.
    pub interval: Duration,
    /// What the terminal can show.
    pub ink: Ink,
}

impl App {
    /// Before anything was told.
    pub fn new(interval: Duration, ink: Ink) -> Self {
        let (model, view) = (Model::new(), View::List);
        Self { model, view, chosen: None, typing: false, paused: false, scroll: 0, interval, ink }
    }

    /// The place of the chosen disk among those that are shown. When it is not among them, the first one is chosen.
    pub fn place(&self) -> usize {
        let is_chosen = |key: &Key| self.chosen.as_ref() == Some(key);
        let mut shown = self.model.shown().into_iter();
        shown.position(|(socket, row)| is_chosen(&(socket.to_owned(), row.disk.name.clone()))).unwrap_or(0)
    }

    /// Chooses the disk that is so many places below the chosen one, or the nearest there is.
    pub fn choose(&mut self, places: isize) {
        let (at, shown) = (self.place(), self.model.shown());
        let at = at.saturating_add_signed(places).min(shown.len().saturating_sub(1));
        self.chosen = shown.get(at).map(|(socket, row)| ((*socket).to_owned(), row.disk.name.clone()));
    }
}
