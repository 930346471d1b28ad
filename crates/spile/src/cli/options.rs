//! The options of formats with clusters, by Spile's names and, with `-o`, by those of qemu-img.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use spile_core::{Error, ErrorKind, Result};
use spile_image::Format;
use spile_image::create::{Compression, NewImage, Options};

use crate::units::parse_size;

/// What a new qcow2 image is like.
#[derive(Clone, Debug, Default, Args)]
pub struct FormatArgs {
    /// Of a qcow2: the size of a cluster, a power of two from 512 to 2M; 64K unless given
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    cluster_size: Option<u64>,
    /// Of a qcow2: allocate clusters in 32 parts. A small write into a child then copies nothing. On for a child unless given
    #[arg(long, value_name = "on|off", value_parser = parse_switch, num_args = 0..=1, require_equals = true, default_missing_value = "on")]
    extended_l2: Option<bool>,
    /// Of a qcow2: the width of refcounts, 1 to 64; 16 unless given
    #[arg(long, value_name = "BITS")]
    refcount_bits: Option<u32>,
    /// Of a qcow2: its version, 0.10 (2) or 1.1 (3); 1.1 unless given
    #[arg(long, value_name = "0.10|1.1", value_parser = parse_compat)]
    compat: Option<u32>,
    /// Of a qcow2: refcounts may be written late
    #[arg(long)]
    lazy_refcounts: bool,
    /// Of a qcow2: how clusters are compressed that will be compressed; deflate unless given
    #[arg(long, value_name = "deflate|zstd", value_parser = parse_compression)]
    compression_type: Option<Compression>,
    /// Options by the names that qemu-img has for them, such as cluster_size=128k,extended_l2=on
    #[arg(short = 'o', value_name = "NAME=VALUE,...")]
    qemu_options: Vec<String>,
}

/// Which space of a new disk is taken at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preallocate {
    /// None.
    Off,
    /// Of a qcow2: none, but each cluster has its place.
    Metadata,
    /// All of it, without writing it.
    Falloc,
    /// All of it, by writing zeroes.
    Full,
}

/// Options with a value that may be left out, and the words that are one. `--preallocate` has values with `create` only.
const JOINED: [(&str, Option<&str>, &[&str]); 2] = [
    ("--preallocate", Some("create"), &["off", "metadata", "falloc", "full"]),
    ("--extended-l2", None, &["on", "off"]),
];

/// The words of a command line, with the value of such an option in one word with it: a value behind a blank could as well be a disk.
pub fn join_values(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    for word in words {
        let is_value = |(option, verb, values): &(&str, Option<&str>, &[&str])| {
            let follows = joined.last().is_some_and(|last| last == option);
            let is_of_verb = verb.is_none_or(|verb| joined.get(1).is_some_and(|word| word == verb));
            follows && is_of_verb && values.iter().any(|value| word == *value)
        };
        match (JOINED.iter().any(is_value), joined.last_mut()) {
            (true, Some(option)) => {
                option.push("=");
                option.push(word);
            }
            _ => joined.push(word),
        }
    }
    joined
}

/// What the options say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    cluster_bytes: Option<u32>,
    options: Options,
    subformat: Option<String>,
    /// Which space is taken at once, if `-o` says so.
    pub preallocate: Option<Preallocate>,
    /// The file that is to hold the data, if `-o` names one.
    pub data_file: Option<PathBuf>,
    /// That file is to be the disk as it is, if `-o` says so.
    pub data_file_raw: bool,
}

impl FormatArgs {
    /// What is chosen, for an image of the format `format`.
    ///
    /// # Errors
    /// `InvalidInput` for what there is not, or the format does not have.
    pub fn choose(&self, format: Format) -> Result<Chosen> {
        let mut chosen = Chosen {
            cluster_bytes: self.cluster_size.map(cluster_bytes).transpose()?,
            options: Options {
                version: self.compat,
                refcount_bits: self.refcount_bits,
                extended_l2: self.extended_l2,
                lazy_refcounts: self.lazy_refcounts,
                compression: self.compression_type,
                places_for_all: false,
                data_file: None,
            },
            ..Chosen::default()
        };
        for option in self.qemu_options.iter().flat_map(|list| list.split(',')) {
            chosen
                .set(option)
                .map_err(|error| invalid(format!("-o {option}: {}", error.message())).hint(hint_of(&error)))?;
        }
        let names_data = chosen.data_file.is_some() || chosen.data_file_raw;
        let is_plain = chosen.cluster_bytes.is_none() && chosen.options == Options::default() && !names_data;
        match format.about().has_options || is_plain {
            true => Ok(chosen),
            false => Err(invalid(format!("a {format} disk has no clusters, refcounts or compression to choose"))
                .hint("leave these options out, or choose --format qcow2")),
        }
    }
}

impl Chosen {
    /// One option by the name that qemu-img has for it.
    fn set(&mut self, option: &str) -> Result<()> {
        let (name, value) = option.split_once('=').unwrap_or((option, "on"));
        let bad = invalid;
        match name {
            "cluster_size" => self.cluster_bytes = Some(cluster_bytes(parse_size(value).map_err(bad)?)?),
            "extended_l2" => self.options.extended_l2 = Some(parse_switch(value).map_err(bad)?),
            "refcount_bits" => {
                self.options.refcount_bits = Some(value.parse().map_err(|_| bad(format!("`{value}` is no number")))?);
            }
            "compat" => self.options.version = Some(parse_compat(value).map_err(bad)?),
            "lazy_refcounts" => self.options.lazy_refcounts = parse_switch(value).map_err(bad)?,
            "compression_type" => self.options.compression = Some(parse_compression(value).map_err(bad)?),
            "preallocation" => {
                let known = Preallocate::from_str(value, false);
                self.preallocate = Some(known.map_err(|_| bad("it is off, metadata, falloc or full".into()))?);
            }
            "subformat" => self.subformat = Some(super::parse_subformat(value).map_err(bad)?),
            "size" => return Err(bad("the size is told by --size".into())),
            "backing_file" => return Err(bad("a parent is named by --parent".into())),
            "backing_fmt" => return Err(bad("the parent's format is named by --parent-format".into())),
            "data_file" => self.data_file = Some(value.into()),
            "data_file_raw" => self.data_file_raw = parse_switch(value).map_err(bad)?,
            _ if name.starts_with("encrypt") => return Err(bad("encrypted images are not made here".into())),
            _ => {
                let known = "cluster_size, extended_l2, refcount_bits, compat, lazy_refcounts, compression_type, \
                             data_file, data_file_raw, preallocation and subformat are known";
                return Err(bad("there is no such option here".into()).hint(known));
            }
        }
        Ok(())
    }

    /// A new image with these options.
    pub fn image(&self, size_bytes: u64, subformat: Option<String>) -> NewImage {
        let subformat = subformat.or_else(|| self.subformat.clone());
        NewImage {
            subformat,
            unit_bytes: self.cluster_bytes,
            options: self.options.clone(),
            ..NewImage::new(size_bytes)
        }
    }

    /// Refuses a data file, where only an image in one file is meant.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn refuse_data_file(self) -> Result<Self> {
        match self.data_file.is_some() || self.data_file_raw {
            true => Err(invalid("only a new, empty disk gets a data file here".into())
                .hint("spile create --data-file FILE makes one")),
            false => Ok(self),
        }
    }

    /// Chooses how clusters will be compressed, unless that is chosen.
    ///
    /// # Errors
    /// `InvalidInput` when something else is chosen.
    pub fn compress(&mut self, compression: Compression) -> Result<()> {
        match self.options.compression {
            Some(other) if other != compression => {
                Err(invalid("--compress and --compression-type differ".into()).hint("leave --compression-type out"))
            }
            _ => {
                self.options.compression = Some(compression);
                Ok(())
            }
        }
    }

    /// Gives each cluster its place from the start.
    pub fn place_all(&mut self) {
        self.options.places_for_all = true;
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

fn hint_of(error: &Error) -> String {
    error.hint_text().unwrap_or("docs/qcow2.md has a table of these options").to_owned()
}

fn cluster_bytes(bytes: u64) -> Result<u32> {
    // What is too large for the number is too large for a cluster, too.
    u32::try_from(bytes).map_err(|_| invalid(format!("a cluster of {bytes} bytes is too large; at most 2M")))
}

/// `on` or `off`, in the words that qemu-img takes for them.
pub fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" | "true" | "yes" => Ok(true),
        "off" | "false" | "no" => Ok(false),
        _ => Err(format!("`{text}` is neither on nor off")),
    }
}

/// A version of qcow2, by the name that qemu-img has for it.
pub fn parse_compat(text: &str) -> Result<u32, String> {
    match text {
        "0.10" | "v2" | "2" => Ok(2),
        "1.1" | "v3" | "3" => Ok(3),
        _ => Err(format!("`{text}` is no version of qcow2; there are 0.10 (version 2) and 1.1 (version 3)")),
    }
}

/// `deflate` or `zstd`. qemu-img calls the first one zlib.
pub fn parse_compression(text: &str) -> Result<Compression, String> {
    match text {
        "deflate" | "zlib" => Ok(Compression::Deflate),
        "zstd" => Ok(Compression::Zstd),
        _ => Err(format!("`{text}` is no compression of qcow2; there are deflate (also called zlib) and zstd")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(words: &str) -> Result<Chosen> {
        FormatArgs { qemu_options: vec![words.into()], ..FormatArgs::default() }.choose(Format::Qcow2)
    }

    #[test]
    fn a_value_behind_a_blank_belongs_to_its_option_and_a_disk_does_not() {
        let joined = |line: &str| {
            let words = join_values(line.split(' ').map(OsString::from));
            words.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(joined("spile create --preallocate metadata d"), ["spile", "create", "--preallocate=metadata", "d"]);
        assert_eq!(joined("spile create --preallocate d"), ["spile", "create", "--preallocate", "d"]);
        assert_eq!(joined("spile convert a --preallocate full"), ["spile", "convert", "a", "--preallocate", "full"]);
        assert_eq!(joined("spile convert --extended-l2 off a"), ["spile", "convert", "--extended-l2=off", "a"]);
        assert_eq!(joined("spile create --extended-l2=on off"), ["spile", "create", "--extended-l2=on", "off"]);
    }

    #[test]
    fn the_names_of_qemu_img_mean_the_same() {
        let by_qemu =
            chosen("cluster_size=128k,extended_l2=on,refcount_bits=8,compression_type=zstd,preallocation=full");
        let ours = FormatArgs {
            cluster_size: Some(128 << 10),
            extended_l2: Some(true),
            refcount_bits: Some(8),
            compression_type: Some(Compression::Zstd),
            ..FormatArgs::default()
        };
        let ours = ours.choose(Format::Qcow2).unwrap();
        assert_eq!(by_qemu.unwrap(), Chosen { preallocate: Some(Preallocate::Full), ..ours });
        assert_eq!(chosen("compat=v2,lazy_refcounts").unwrap().options.version, Some(2));
    }

    #[test]
    fn what_there_is_not_is_refused_by_name() {
        for (words, says) in [
            ("backing_file=x", "--parent"),
            ("size=1G", "--size"),
            ("cluster_sise=1", "no such option"),
            ("encrypt.format=luks", "encrypted"),
            ("extended_l2=maybe", "neither on nor off"),
        ] {
            let error = chosen(words).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(words), "{error}");
        }
        let vhd = FormatArgs { cluster_size: Some(65536), ..FormatArgs::default() };
        assert!(vhd.choose(Format::Vhd).is_err() && FormatArgs::default().choose(Format::Vhd).is_ok());
    }
}
