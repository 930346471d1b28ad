//! Raw bytes of a disk from stdin and to stdout.

use std::fs::File;
use std::io::{Read, Write, stdin, stdout};
use std::os::unix::fs::FileExt;

use spile_core::{Disk, Error, ErrorKind, Extent, Result, Segments};
pub use spile_life::backup::{Beneath, data_runs, put, zero};

use super::copy::{CHUNK_BYTES, Chunks, read};

/// Reads until `buffer` is full or the stream ends; returns how many bytes there were.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match input.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(more) => done += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("cannot read from stdin", error)),
        }
    }
    Ok(done)
}

/// Copies stdin into a new, empty file, with holes for zeroes, and makes it durable. Returns the length and how many bytes of
/// data were written.
///
/// # Errors
/// The system's.
pub fn into_file(file: &File) -> Result<(u64, u64)> {
    let failed = |error| Error::io("cannot write", error);
    let (mut input, mut buffer) = (stdin().lock(), vec![0; CHUNK_BYTES as usize]);
    let (mut at, mut written) = (0, 0);
    loop {
        let len = fill(&mut input, &mut buffer)?;
        for run in data_runs(&Segments::copied(&buffer[..len])) {
            written += run.len() as u64;
            file.write_all_at(&buffer[run.clone()], at + run.start as u64).map_err(failed)?;
        }
        at += len as u64;
        if len < buffer.len() {
            break;
        }
    }
    file.set_len(at).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok((at, written))
}

/// Copies stdin to `dst` and makes it durable; what is left of the disk becomes zeroes. Returns how many bytes of data were
/// written.
///
/// # Errors
/// `NoSpace` when there are more bytes than the disk has; the disk's.
pub async fn into_disk(dst: &impl Disk, beneath: Beneath, bar: &super::Progress) -> Result<u64> {
    let (mut input, mut buffer) = (stdin().lock(), vec![0; CHUNK_BYTES as usize]);
    let (size, mut at, mut written) = (dst.info().size_bytes, 0, 0);
    loop {
        let len = fill(&mut input, &mut buffer)?;
        if len as u64 > size - at {
            let what = format!("stdin has more bytes than the disk, which has {size}");
            return Err(Error::new(ErrorKind::NoSpace, what).hint("say a larger --size, or use a larger disk"));
        }
        written += put(dst, beneath, at, &Segments::copied(&buffer[..len])).await?;
        at += len as u64;
        bar.inc(len as u64);
        if len < buffer.len() {
            break;
        }
    }
    zero(dst, beneath, at..size).await?;
    dst.flush().await?;
    Ok(written)
}

/// Writes all of `src` to stdout, and zeroes up to `size_bytes`.
///
/// # Errors
/// The disk's; when stdout cannot be written to.
pub async fn out_of_disk(src: &impl Disk, size_bytes: u64) -> Result<()> {
    let mut out = stdout().lock();
    let end = src.info().size_bytes;
    let mut chunks = Chunks::new(src, Extent::from_range(0..end));
    while let Some(chunk) = chunks.next().await? {
        match chunk.is_data {
            true => out.write_all(&read(src, chunk.extent).await?.to_vec()).map_err(not_written)?,
            false => write_zeroes(&mut out, chunk.extent.len_bytes)?,
        }
    }
    write_zeroes(&mut out, size_bytes - end)?;
    out.flush().map_err(not_written)
}

fn write_zeroes(out: &mut impl Write, mut len_bytes: u64) -> Result<()> {
    let zeroes = vec![0; CHUNK_BYTES.min(len_bytes) as usize];
    while len_bytes > 0 {
        let part = len_bytes.min(zeroes.len() as u64);
        out.write_all(&zeroes[..part as usize]).map_err(not_written)?;
        len_bytes -= part;
    }
    Ok(())
}

fn not_written(error: std::io::Error) -> Error {
    Error::io("cannot write to stdout", error)
}
