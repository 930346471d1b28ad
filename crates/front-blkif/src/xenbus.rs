//! The keys in xenstore by which back end and front end agree on a ring (public/io/blkif.h, xenbus.h).
//!
//! What the guest writes is text that it may change at any moment. So each key is read once, and parsed with bounds.

use spile_core::{DiskInfo, Error, ErrorKind, Result, SECTOR_BYTES};
use spile_xen::blkif::{Abi, ring_slots, split};
use spile_xen::store::{Tx, XenStore};
use spile_xen::{DomId, GrantRef, Port};

use crate::pages::Access;

/// The state of one end of a device (XenbusState).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// This end has begun.
    Initialising = 1,
    /// The back end has written its features and waits for the front end.
    InitWait = 2,
    /// The front end has written its ring.
    Initialised = 3,
    /// The disk is in use.
    Connected = 4,
    /// This end wants to close.
    Closing = 5,
    /// This end has closed.
    Closed = 6,
}

impl State {
    /// Parses a state. `None` for a text that is no state, and for 0 (unknown).
    pub fn parse(text: &str) -> Option<Self> {
        use State::*;
        let all = [Initialising, InitWait, Initialised, Connected, Closing, Closed];
        text.parse().ok().and_then(|number: usize| all.get(number.checked_sub(1)?).copied())
    }

    /// The state as text in xenstore.
    pub fn text(self) -> &'static str {
        ["1", "2", "3", "4", "5", "6"][self as usize - 1]
    }
}

/// The largest ring has 2^4 pages.
pub const MAX_RING_ORDER: u32 = 4;
/// The most rings of one disk.
pub const MAX_QUEUES: u16 = 64;
/// The most segments of an indirect request: 1 MiB in whole pages.
pub const MAX_INDIRECT: u16 = 256;
/// The most digits that a number in xenstore may have.
const MAX_DIGITS: usize = 10;

/// What a back end offers.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The largest ring has 2^`max_order` pages.
    pub max_order: u32,
    /// The most rings.
    pub max_queues: u16,
    /// The most segments of an indirect request; 0 when there are no indirect requests.
    pub max_indirect: u16,
    /// How the guest's pages are reached.
    pub access: Access,
    /// True when nothing may be written.
    pub read_only: bool,
    /// True when responses may have separate rings ([`split`]).
    pub splits_rings: bool,
}

impl Offer {
    /// Everything that this back end can offer.
    pub const WIDEST: Self = Self {
        max_order: MAX_RING_ORDER,
        max_queues: MAX_QUEUES,
        max_indirect: MAX_INDIRECT,
        access: Access::Copy,
        read_only: false,
        splits_rings: true,
    };
}

/// The features, as keys below the back end's path.
pub fn features(offer: &Offer, info: &DiskInfo, may_discard: bool) -> Vec<(&'static str, String)> {
    let flag = |is_set: bool| u8::from(is_set).to_string();
    let mut keys = vec![
        ("feature-flush-cache", flag(true)),
        ("feature-barrier", flag(true)),
        // When the hypervisor copies, persistent grants would only make the guest copy once more.
        ("feature-persistent", flag(offer.access == Access::Persistent)),
        ("max-ring-page-order", offer.max_order.to_string()),
        ("max-ring-pages", (1u32 << offer.max_order).to_string()),
        ("multi-queue-max-queues", offer.max_queues.to_string()),
    ];
    // The keys are written also when nothing is offered, because another back end may have left other values.
    keys.push(("feature-max-indirect-segments", offer.max_indirect.to_string()));
    keys.push((split::FEATURE, flag(offer.splits_rings)));
    let discards = may_discard && !offer.read_only;
    keys.push(("feature-discard", flag(discards)));
    if discards {
        // Linux uses both keys or none.
        keys.push(("discard-granularity", info.discard_align_bytes.max(SECTOR_BYTES as u32).to_string()));
        keys.push(("discard-alignment", flag(false)));
        keys.push(("discard-secure", flag(false)));
    }
    keys
}

/// The properties of the disk, as keys below the back end's path. The guest reads them before it uses the disk.
pub fn properties(info: &DiskInfo, flags: u32) -> Vec<(&'static str, String)> {
    vec![
        ("sectors", (info.size_bytes / SECTOR_BYTES).to_string()),
        // With other sizes, older front ends disagree on the unit.
        ("sector-size", SECTOR_BYTES.to_string()),
        ("physical-sector-size", "4096".to_string()),
        ("info", flags.to_string()),
    ]
}

/// The flags of the key `info` (VDISK_*).
pub mod disk_flag {
    /// The disk is a CD-ROM.
    pub const CDROM: u32 = 1;
    /// The medium can be removed.
    pub const REMOVABLE: u32 = 2;
    /// The disk is read-only.
    pub const READONLY: u32 = 4;
}

/// What a front end has asked for in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The layout of its requests.
    pub abi: Abi,
    /// True when it keeps its pages granted, so that they may stay mapped.
    pub is_persistent: bool,
    /// Its rings.
    pub rings: Vec<RingWish>,
}

/// One ring of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingWish {
    /// The ring has 2^`order` pages.
    pub order: u32,
    /// The grants of its pages, in order.
    pub refs: Vec<GrantRef>,
    /// The grants of the pages of a separate ring of responses; empty when there is none.
    pub response_refs: Vec<GrantRef>,
    /// The event channel of the ring.
    pub port: Port,
}

impl RingWish {
    /// The most requests in flight.
    pub fn max_in_flight(&self) -> u32 {
        match self.response_refs.len() {
            0 => ring_slots(self.order),
            pages => split::response_slots(pages.ilog2()),
        }
    }
}

/// Reads what the front end at `path` has written, within what was offered.
///
/// # Errors
/// `InvalidInput` when a key is missing, is no number, or asks for more than was offered; else those of xenstore.
pub fn read_wish(store: &mut XenStore, path: &str, offer: &Offer) -> Result<Wish> {
    let mut keys = Keys { store, path };
    let abi = match keys.text("protocol")? {
        // On x86 a guest that names no layout is a 32-bit guest.
        None if cfg!(target_arch = "x86_64") => Abi::X86_32,
        None => Abi::X86_64,
        Some(name) => Abi::from_name(&name).ok_or_else(|| keys.bad("protocol", &name))?,
    };
    let queues = keys.number("multi-queue-num-queues", 1, u32::from(offer.max_queues))?.unwrap_or(1);
    let is_persistent = keys.number("feature-persistent", 0, u32::MAX)?.is_some_and(|value| value != 0);
    let is_split = keys.number(split::WANTED, 0, u32::from(offer.splits_rings))? == Some(1);
    let mut rings = Vec::new();
    for queue in 0..queues {
        let folder = if queues > 1 { format!("queue-{queue}/") } else { String::new() };
        rings.push(keys.ring(&folder, offer.max_order, is_split)?);
    }
    let mut refs: Vec<_> = rings.iter().flat_map(|ring| ring.refs.iter().chain(&ring.response_refs)).collect();
    refs.sort();
    if refs.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{path}: one page is in two rings, or twice in one")));
    }
    Ok(Wish { abi, is_persistent, rings })
}

/// Reads the keys of a front end.
struct Keys<'a> {
    store: &'a mut XenStore,
    path: &'a str,
}

impl Keys<'_> {
    fn text(&mut self, key: &str) -> Result<Option<String>> {
        self.store.read_optional(Tx::NONE, &format!("{}/{key}", self.path))
    }

    fn bad(&self, key: &str, value: &str) -> Error {
        let value: String = value.chars().take(32).collect();
        Error::new(ErrorKind::InvalidInput, format!("{}/{key} is {value:?}, which cannot be served", self.path))
    }

    fn number(&mut self, key: &str, least: u32, most: u32) -> Result<Option<u32>> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        let is_number = (1..=MAX_DIGITS).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|number| is_number && (least..=most).contains(number));
        number.map(Some).ok_or_else(|| self.bad(key, &text))
    }

    fn demand(&mut self, key: &str) -> Result<u32> {
        let missing = Error::new(ErrorKind::InvalidInput, format!("{}/{key} is missing", self.path));
        self.number(key, 0, u32::MAX)?.ok_or(missing)
    }

    fn ring(&mut self, folder: &str, max_order: u32, is_split: bool) -> Result<RingWish> {
        let order = self.order(max_order)?;
        let pages = 1u32 << order;
        let single = format!("{folder}ring-ref");
        // With an order of 0 some front ends write the key without a number, and some the key with the number 0. A
        // front end that writes no order means the key without a number: the other one was left by an earlier driver.
        let has_order = self.text("ring-page-order")?.is_some();
        let is_single = !has_order && self.text(&single)?.is_some();
        let refs = if pages == 1 && (is_single || self.text(&format!("{folder}ring-ref0"))?.is_none()) {
            vec![GrantRef(self.demand(&single)?)]
        } else {
            self.refs(&format!("{folder}ring-ref"), pages)?
        };
        let mut response_refs = Vec::new();
        if is_split {
            let order = self.number(split::ORDER, 0, max_order)?.unwrap_or(0);
            response_refs = self.refs(&format!("{folder}{}", split::REF), 1 << order)?;
        }
        Ok(RingWish { order, refs, response_refs, port: Port(self.demand(&format!("{folder}event-channel"))?) })
    }

    /// The grants in the keys `NAME0`, `NAME1` and so on, one for each page.
    fn refs(&mut self, key: &str, pages: u32) -> Result<Vec<GrantRef>> {
        (0..pages).map(|page| self.demand(&format!("{key}{page}")).map(GrantRef)).collect()
    }

    /// The order of all rings of the device: it is written once.
    fn order(&mut self, max_order: u32) -> Result<u32> {
        if let Some(order) = self.number("ring-page-order", 0, max_order)? {
            return Ok(order);
        }
        match self.number("num-ring-pages", 1, 1 << max_order)? {
            Some(pages) if !pages.is_power_of_two() => Err(self.bad("num-ring-pages", &pages.to_string())),
            pages => Ok(pages.unwrap_or(1).ilog2()),
        }
    }
}

/// The guest and the device that a back end's path names in its last two parts.
///
/// # Errors
/// `InvalidInput` when those are no numbers.
pub fn guest_of(backend_path: &str) -> Result<(DomId, u32)> {
    let mut parts = backend_path.rsplit('/');
    let device = parts.next().and_then(|part| part.parse().ok());
    let domain = parts.next().and_then(|part| part.parse().ok()).map(DomId);
    let bad = || Error::new(ErrorKind::InvalidInput, format!("{backend_path:?} is no back end's path in xenstore"));
    domain.zip(device).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_numbers_from_1_to_6() {
        for number in 1..=6 {
            assert_eq!(State::parse(&number.to_string()).unwrap().text(), number.to_string());
        }
        for other in ["0", "7", "", "four", "-1", "4 ", "99999999999999999999"] {
            assert_eq!(State::parse(other), None, "{other:?}");
        }
    }

    #[test]
    fn paths_name_guest_and_device() {
        assert_eq!(guest_of("/local/domain/0/backend/vbd/12/51712").unwrap(), (DomId(12), 51712));
        for bad in ["", "/", "a/b", "/x/70000/1", "/local/domain/0/backend/vbd/1"] {
            assert!(guest_of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn discards_are_offered_whole_or_not() {
        let info = DiskInfo {
            size_bytes: 1 << 30,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        };
        let offer = Offer {
            max_order: 4,
            max_queues: 2,
            max_indirect: 256,
            access: Access::Copy,
            read_only: false,
            splits_rings: false,
        };
        let keys = features(&offer, &info, true);
        let get = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(get("discard-granularity"), Some("4096"));
        assert_eq!((get("feature-persistent"), get("feature-flush-cache")), (Some("0"), Some("1")));
        let keys = features(&Offer { read_only: true, ..offer }, &info, true);
        assert!(keys.iter().all(|(key, value)| !key.contains("discard") || value == "0"));
    }
}
