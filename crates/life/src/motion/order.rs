//! [`Order`]: what the old place of a disk asks of the other host, where `spile receive` takes disks in.
//!
//! An order is the name of an export, so any link that carries NBD carries it, and it is answered when the export is chosen: who goes on has the
//! image as an export then, and who finishes knows that it has its name, durably. Each may be given again at any time.
//!
//! Some servers, nbdkit among them, have one export and take any name for it: there every order finds something. So an order that gives no image
//! finds an export that says who has answered ([`ANSWER`]).

use spile_core::{
    Code, Error, ErrorKind, Files, Locator, OpenMode, Result, Segments, Store, StoreOffset, Via, is_unseen,
};
use spile_image::Format;
use spile_image::layer::Identity;

use crate::jobs::note::{from_hex, to_hex};

/// An order about the disk of a name, or about a parent of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// The image of this move is to be there, of so many bytes; made if it is not, under a hidden name.
    Begin {
        /// The identity of the move.
        id: Identity,
        /// The disk's size.
        size_bytes: u64,
    },
    /// As [`Order::Begin`], of one image of a disk that comes with its parents. An image that an earlier attempt of this move has begun goes: what it holds is not
    /// known to this one. One that a later attempt has begun stays.
    BeginInChain {
        /// The identity of the move, in this attempt.
        id: Identity,
        /// The size of what the image shows.
        size_bytes: u64,
        /// Which image it is.
        image: InChain,
    },
    /// Asks for a parent of this name: is there one that has come here, and is it like this? The answer to a name that nothing has is a refusal in words of its own.
    Find {
        /// The identity of the move that needs it.
        id: Identity,
        /// The size of what it shows.
        size_bytes: u64,
        /// What it is.
        like: Like,
    },
    /// This attempt of a move goes on with the half that the attempt `of` has begun, and that is not whole: it is this one's from now on, and no order of the earlier one
    /// is meant for it any more.
    TakeOver {
        /// The identity of the move, in this attempt.
        id: Identity,
        /// That of the attempt which has begun the half.
        of: Identity,
    },
    /// The image of this move, which is there, is written to through a new link. Nothing comes any more from those of before.
    GoOn {
        /// The identity of the move.
        id: Identity,
        /// The link: all of its connections name it.
        link: Identity,
    },
    /// A process that was started anew asks whether it may go on with the half of this move: not when that has its name.
    Ask {
        /// The identity of the move.
        id: Identity,
    },
    /// The disk comes back: the old image that it has left here by the move `of` is the half of this move, when nobody has written to it since.
    Back {
        /// The identity of the move.
        id: Identity,
        /// That of the move by which the disk went.
        of: Identity,
        /// The disk's size.
        size_bytes: u64,
    },
    /// A file is to be there, empty and of so many bytes, for what has changed of this move's disk.
    Marks {
        /// The identity of the move.
        id: Identity,
        /// Its length.
        len_bytes: u64,
    },
    /// That file is whole. From now on it is the disk's, and what comes to its image is noted there.
    Marked {
        /// The identity of the move.
        id: Identity,
    },
    /// The old place is about to be the disk no more: from now on the image of this move may be it.
    HandOver {
        /// The identity of the move.
        id: Identity,
    },
    /// The image of this move is whole: it gets its name.
    Finish {
        /// The identity of the move.
        id: Identity,
    },
    /// The move is given up: its half-made image goes.
    Drop {
        /// The identity of the move.
        id: Identity,
    },
}

/// What is the same in an image and in its copy, besides all that it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Like {
    /// Its format.
    pub format: Format,
    /// Its UUID, when it has one.
    pub uuid: Option<Identity>,
}

/// One image of a disk that comes with its parents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InChain {
    /// It is a parent, and not the disk's own image.
    pub is_parent: bool,
    /// What it is to be. An image without a UUID here gets one of its own, if its format has that.
    pub like: Like,
    /// Its parent: an image of the same folder. `None` for the lowest image.
    pub below: Option<Below>,
}

/// The parent of an image that comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// Its file name.
    pub name: String,
    /// The move by which it has come, where the other host knows that. Else it compares the parent with its own once the new image names it.
    pub by: Option<Identity>,
}

/// The next attempt of the move `id`, which keeps its chain: the last four bytes count the attempts. A process that was started anew begins one, for it does not know what the
/// ones before have sent, and what of that is still on its way.
pub(super) fn next_attempt(id: Identity) -> Identity {
    let mut next = id;
    next.0[12..].copy_from_slice(&attempt(id).wrapping_add(1).to_be_bytes());
    next
}

fn attempt(id: Identity) -> u32 {
    u32::from_be_bytes(id.0[12..].try_into().expect("an identity has 16 bytes"))
}

/// True when `id` is an earlier attempt of the move whose attempt `other` is.
pub(super) fn is_earlier_attempt(id: Identity, other: Identity) -> bool {
    // As serial numbers are compared: a count may begin anywhere.
    id.0[..12] == other.0[..12] && attempt(other).wrapping_sub(attempt(id)) as i32 > 0
}

/// The length of the export that is the answer to an order which was obeyed.
pub const ANSWER_BYTES: u64 = 4096;

/// The answer begins so.
pub const ANSWER: &str = "spile receive has done what it was told\n";

/// Gives the order that is at `at`, and hears that it was obeyed.
///
/// # Errors
/// `NotFound` where there is no `spile receive`; what that says of an order that it refuses; the system's.
pub(super) async fn give<F: Files>(files: &F, at: &Locator) -> Result<()> {
    let answer = files.open(at, OpenMode::ReadOnly).await.map_err(|error| about_the_disk(error, at))?;
    let bytes = Segments::zeroed(ANSWER_BYTES as usize);
    if answer.len_bytes() == ANSWER_BYTES {
        answer.read_at(StoreOffset(0), &bytes, Via::Direct).await?;
    }
    match bytes.to_vec().starts_with(ANSWER.as_bytes()) {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::NotFound, format!("{at}: the server there is no `spile receive`"))),
    }
}

/// `error`, which speaks of the export of an order, about the disk's place, which the user knows.
fn about_the_disk(error: Error, at: &Locator) -> Error {
    let order = at.to_string();
    let Some((before, rest)) = order.split_once(PREFIX) else { return error };
    let (export, query) =
        rest.split_once('?').map_or((rest, String::new()), |(export, query)| (export, format!("?{query}")));
    let export = format!("{PREFIX}{export}");
    let Some((_, name)) = Order::of_export(&export) else { return error };
    error.reworded(|text| text.replace(&order, &format!("{before}{name}{query}")))
}

/// The answer to an order that failed with `error`: the order may be given again, unless `error` refuses it.
pub fn not_now(error: Error) -> Error {
    if is_no(&error) { error } else { error.coded(Code::Retry) }
}

/// True when `error` says that an order is refused. Else nobody knows whether it was obeyed.
fn is_no(error: &Error) -> bool {
    use ErrorKind::{Denied, Exists, InvalidInput, NotFound, Unsupported};
    let is_refusal = matches!(error.kind(), Denied | Exists | InvalidInput | NotFound | Unsupported);
    is_refusal && !error.is(Code::Retry)
}

/// True when the other host has said that it refuses an order. What the system of this host says, such as that there is no such socket, is no answer
/// of that one.
pub(super) fn is_refused_there(error: &Error) -> bool {
    is_no(error) && error.os_errno().is_none()
}

/// Orders begin so. No disk is called so: a name has no `/`.
const PREFIX: &str = ".spile-receive/";

impl Order {
    /// The name of the export that is this order about the disk `name`.
    pub fn export(&self, name: &str) -> String {
        match self {
            Self::Begin { id, size_bytes } => format!("{PREFIX}begin/{}/{size_bytes}/{name}", to_hex(*id)),
            Self::BeginInChain { id, size_bytes, image } => {
                format!("{PREFIX}begin-in-chain/{}/{size_bytes}/{}/{name}", to_hex(*id), image.to_text())
            }
            Self::Find { id, size_bytes, like } => {
                format!("{PREFIX}find/{}/{size_bytes}/{}/{name}", to_hex(*id), like.to_text())
            }
            Self::TakeOver { id, of } => format!("{PREFIX}take-over/{}/{}/{name}", to_hex(*id), to_hex(*of)),
            Self::GoOn { id, link } => format!("{PREFIX}go-on/{}/{}/{name}", to_hex(*id), to_hex(*link)),
            Self::Ask { id } => format!("{PREFIX}ask/{}/{name}", to_hex(*id)),
            Self::Back { id, of, size_bytes } => {
                format!("{PREFIX}back/{}/{}/{size_bytes}/{name}", to_hex(*id), to_hex(*of))
            }
            Self::Marks { id, len_bytes } => format!("{PREFIX}marks/{}/{len_bytes}/{name}", to_hex(*id)),
            Self::Marked { id } => format!("{PREFIX}marked/{}/{name}", to_hex(*id)),
            Self::HandOver { id } => format!("{PREFIX}hand-over/{}/{name}", to_hex(*id)),
            Self::Finish { id } => format!("{PREFIX}finish/{}/{name}", to_hex(*id)),
            Self::Drop { id } => format!("{PREFIX}drop/{}/{name}", to_hex(*id)),
        }
    }

    /// True for the name of an export that is meant as an order, also one that this version does not know.
    pub fn is_meant(export: &str) -> bool {
        export.starts_with(PREFIX)
    }

    /// What an export's name asks for, and of which disk. `None` for one that is no order.
    pub fn of_export(export: &str) -> Option<(Self, &str)> {
        let (verb, rest) = export.strip_prefix(PREFIX)?.split_once('/')?;
        let (id, rest) = rest.split_once('/')?;
        let id = Identity(from_hex(id)?);
        match verb {
            "begin" => {
                let (size, name) = rest.split_once('/')?;
                Some((Self::Begin { id, size_bytes: size.parse().ok()? }, name))
            }
            "begin-in-chain" => {
                let mut fields = rest.split('/');
                let size_bytes = fields.next()?.parse().ok()?;
                let (image, name) = (InChain::of_fields(&mut fields)?, fields.next()?);
                fields.next().is_none().then_some((Self::BeginInChain { id, size_bytes, image }, name))
            }
            "find" => {
                let mut fields = rest.split('/');
                let size_bytes = fields.next()?.parse().ok()?;
                let (like, name) = (Like::of_fields(&mut fields)?, fields.next()?);
                fields.next().is_none().then_some((Self::Find { id, size_bytes, like }, name))
            }
            "take-over" => {
                let (of, name) = rest.split_once('/')?;
                Some((Self::TakeOver { id, of: Identity(from_hex(of)?) }, name))
            }
            "go-on" => {
                let (link, name) = rest.split_once('/')?;
                Some((Self::GoOn { id, link: Identity(from_hex(link)?) }, name))
            }
            "ask" => Some((Self::Ask { id }, rest)),
            "back" => {
                let (of, rest) = rest.split_once('/')?;
                let (size, name) = rest.split_once('/')?;
                Some((Self::Back { id, of: Identity(from_hex(of)?), size_bytes: size.parse().ok()? }, name))
            }
            "marks" => {
                let (len, name) = rest.split_once('/')?;
                Some((Self::Marks { id, len_bytes: len.parse().ok()? }, name))
            }
            "marked" => Some((Self::Marked { id }, rest)),
            "hand-over" => Some((Self::HandOver { id }, rest)),
            "finish" => Some((Self::Finish { id }, rest)),
            "drop" => Some((Self::Drop { id }, rest)),
            _ => None,
        }
    }

    /// The locator by which this order is given about the disk that is to be at `to`. `None` when `to` is no export with a name.
    pub fn locator(&self, to: &Locator) -> Option<Locator> {
        beside(to, &self.export(name_at(to)?))
    }
}

/// Stands in an order for something that there is not. No file is called so: see [`is_name`].
const NONE: &str = "-";

fn hex_of(id: Option<Identity>) -> String {
    id.map_or(NONE.to_owned(), to_hex)
}

fn id_of(field: &str) -> Option<Option<Identity>> {
    if field == NONE { Some(None) } else { from_hex(field).map(|id| Some(Identity(id))) }
}

impl Like {
    fn to_text(self) -> String {
        format!("{}/{}", self.format, hex_of(self.uuid))
    }

    fn of_fields<'a>(fields: &mut impl Iterator<Item = &'a str>) -> Option<Self> {
        let (format, uuid) = (fields.next()?.parse().ok()?, id_of(fields.next()?)?);
        // Other identities are made of what an image holds, and are not given to a new one.
        uuid.is_none_or(|uuid| uuid.0 != [0; 16] && Format::lasts(uuid)).then_some(Self { format, uuid })
    }
}

impl InChain {
    fn to_text(&self) -> String {
        let role = if self.is_parent { "parent" } else { "disk" };
        let (name, by) = self.below.as_ref().map_or((NONE, None), |below| (below.name.as_str(), below.by));
        format!("{role}/{}/{name}/{}", self.like.to_text(), hex_of(by))
    }

    fn of_fields<'a>(fields: &mut impl Iterator<Item = &'a str>) -> Option<Self> {
        let is_parent = match fields.next()? {
            "parent" => true,
            "disk" => false,
            _ => return None,
        };
        let like = Like::of_fields(fields)?;
        let (name, by) = (fields.next()?, id_of(fields.next()?)?);
        let below = (name != NONE).then(|| Below { name: name.to_owned(), by });
        Some(Self { is_parent, like, below })
    }
}

/// What stands in a locator for the file name `name`.
pub(super) fn to_uri(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    name.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The file name that stands in a locator as `text`. `None` where that is no encoding of a name.
pub(super) fn of_uri(text: &str) -> Option<String> {
    let (mut name, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((plain, encoded)) = rest.split_once('%') {
        name.extend_from_slice(plain.as_bytes());
        let digits = encoded.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        name.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &encoded[2..];
    }
    name.extend_from_slice(rest.as_bytes());
    String::from_utf8(name).ok()
}

/// A locator of an export with a name, in its parts: all before the name, the name, and all behind it.
fn parts_of(at: &Locator) -> Option<(String, &str, String)> {
    let Locator::Nbd(uri) = at else { return None };
    let (scheme, rest) = uri.split_once("://")?;
    let (place, query) = match rest.split_once('?') {
        Some((place, query)) => (place, format!("?{query}")),
        None => (rest, String::new()),
    };
    let (host, name) = place.split_once('/').filter(|(_, name)| !name.is_empty())?;
    Some((format!("{scheme}://{host}/"), name, query))
}

/// The name of the export at `at`, as it stands there.
pub(super) fn name_at(at: &Locator) -> Option<&str> {
    parts_of(at).map(|(_, name, _)| name)
}

/// The export of the name `name`, as it stands in a locator, on the host of `at`.
pub(super) fn beside(at: &Locator, name: &str) -> Option<Locator> {
    let (before, _, query) = parts_of(at)?;
    Some(Locator::Nbd(format!("{before}{name}{query}")))
}

/// True when `name` may be that of a disk that is taken in: one file of a folder, which is not hidden, and no option of a command. What
/// changes how text around it is shown is refused.
pub fn is_name(name: &str) -> bool {
    let is_seen = |c: char| !is_unseen(c) && !is_joiner(c);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+@ ".contains(c) || !c.is_ascii() && is_seen(c);
    !name.is_empty() && name.len() <= MOST_NAME_BYTES && !name.starts_with(['.', '-']) && name.chars().all(is_plain)
}

/// True for the characters that join others, and are not seen: a name with one looks like a name without.
fn is_joiner(c: char) -> bool {
    matches!(c, '\u{200c}' | '\u{200d}')
}

/// The hidden names beside a disk are longer than its own, and 255 bytes are the most.
const MOST_NAME_BYTES: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Identity = Identity([0xa7; 16]);

    #[test]
    fn an_order_is_read_back_from_its_export() {
        let go_on = Order::GoOn { id: ID, link: Identity([0x3c; 16]) };
        let begin = Order::Begin { id: ID, size_bytes: 1 << 30 };
        let (marks, marked) = (Order::Marks { id: ID, len_bytes: 4 << 20 }, Order::Marked { id: ID });
        let back = Order::Back { id: ID, of: Identity([0x5e; 16]), size_bytes: 9 << 20 };
        let plain =
            [Order::Ask { id: ID }, Order::HandOver { id: ID }, Order::Finish { id: ID }, Order::Drop { id: ID }];
        let like = |format, uuid| Like { format, uuid };
        let chained =
            [(None, true), (Some(Below { name: "b.vhd".to_owned(), by: None }), true)].map(|(below, is_parent)| {
                let image = InChain { is_parent, like: like(Format::Vhd, Some(ID)), below };
                Order::BeginInChain { id: ID, size_bytes: 9, image }
            });
        let below = Some(Below { name: "c d.raw".to_owned(), by: Some(ID) });
        let leaf = InChain { is_parent: false, like: like(Format::Qcow2, None), below };
        let leaf = Order::BeginInChain { id: ID, size_bytes: 9, image: leaf };
        let find = Order::Find { id: ID, size_bytes: 1 << 20, like: like(Format::Raw, None) };
        let over = Order::TakeOver { id: ID, of: Identity([0x5e; 16]) };
        for order in plain.into_iter().chain([begin, go_on, marks, marked, back, leaf, find, over]).chain(chained) {
            assert_eq!(Order::of_export(&order.export("a b.vhd")), Some((order, "a b.vhd")));
        }
        let hex = "a7".repeat(16);
        for bad in
            ["5/vhd/-", "x/vhd/-/a", "5/vdi/-/a", "5/vhd/a7/a", "5/vhd/-/a/b", &format!("5/vhd/{}/a", "0".repeat(32))]
        {
            assert_eq!(Order::of_export(&format!("{PREFIX}find/{hex}/{bad}")), None, "{bad}");
        }
        for bad in ["5/x/vhd/-/-/-/a", "5/disk/vhd/-/-/a", "5/disk/vhd/-/b/-/a/c"] {
            assert_eq!(Order::of_export(&format!("{PREFIX}begin-in-chain/{hex}/{bad}")), None, "{bad}");
        }
        for other in ["", "a.vhd", ".spile-receive/", ".spile-receive/finish/a7/x", &format!("{PREFIX}begin/{hex}/x")] {
            assert_eq!(Order::of_export(other), None, "{other}");
        }
    }

    #[test]
    fn attempts_of_one_move_follow_each_other() {
        let mut last = ID;
        last.0[12..].fill(0xff);
        for id in [ID, last] {
            let next = next_attempt(id);
            assert!(is_earlier_attempt(id, next) && !is_earlier_attempt(next, id) && !is_earlier_attempt(id, id));
            assert!(is_earlier_attempt(id, next_attempt(next)));
        }
        assert!(!is_earlier_attempt(ID, next_attempt(Identity([0x3c; 16]))), "another move");
    }

    #[test]
    fn an_error_about_an_order_names_the_disk_and_keeps_its_errno() {
        let to = Locator::Nbd("nbd+unix:///a.vhd?socket=/s".to_owned());
        let order = Order::Ask { id: ID }.locator(&to).unwrap();
        let error = Error::errno("cannot connect", 2).at_path(std::path::Path::new(&order.to_string()));
        let told = about_the_disk(error, &order);
        assert_eq!(told.path(), Some(std::path::Path::new(&to.to_string())));
        assert!(told.os_errno() == Some(2) && !is_refused_there(&told), "{told}");
    }

    #[test]
    fn a_socket_that_is_missing_has_refused_nothing() {
        let of_system = |errno| Error::errno("cannot connect", errno);
        // ENOENT and EACCES.
        for error in [of_system(2), of_system(13)] {
            assert!(is_no(&error) && !is_refused_there(&error), "{error}");
        }
        let said = Error::new(ErrorKind::NotFound, "the server has no such export");
        assert!(is_refused_there(&said) && !is_refused_there(&not_now(of_system(5))));
    }

    #[test]
    fn an_order_goes_to_the_host_of_the_disks_new_place() {
        let at = |uri: &str| Order::Finish { id: ID }.locator(&Locator::Nbd(uri.to_owned()));
        let order = format!(".spile-receive/finish/{}", "a7".repeat(16));
        let of = |uri: String| Some(Locator::Nbd(uri));
        assert_eq!(at("nbds://h:10/a.vhd?tls-hostname=x"), of(format!("nbds://h:10/{order}/a.vhd?tls-hostname=x")));
        assert_eq!(at("nbd+unix:///a?socket=/s/t"), of(format!("nbd+unix:///{order}/a?socket=/s/t")));
        assert_eq!((at("nbd://h"), at("nbd://h/"), at("nbd+unix:///?socket=/s")), (None, None, None));
    }

    #[test]
    fn a_name_in_a_locator_is_read_as_it_was_written() {
        for name in ["disk.vhd", "vm 1.raw", "größe.raw", "50%.raw", "%25.raw", ""] {
            assert_eq!(of_uri(&to_uri(name)).as_deref(), Some(name));
        }
        assert_eq!(of_uri("base%2Evhd").as_deref(), Some("base.vhd"));
        for bad in ["%", "a%2", "%+1", "%g0", "%ff", "%€"] {
            assert_eq!(of_uri(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_name_is_one_file_of_the_folder() {
        for name in ["disk.vhd", "vm 1.raw", "größe.raw", "a..b"] {
            assert!(is_name(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "-f.raw",
            "a\u{202e}war.b",
            "a\u{200b}b",
            ".hidden",
            "a/b",
            "../a",
            "a\0b",
            "a\nb",
            "a\\b",
            "$a",
            "a\u{85}b",
            &"a".repeat(201),
        ] {
            assert!(!is_name(name), "{name:?}");
        }
    }
}
