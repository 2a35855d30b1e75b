# cmake -DSOURCE=DIR -DVERSION=X -DHEADER=FILE -P version_header.cmake
# Writes the version and the commit as a header, at every build: a configured value would be that of an older commit. The
# header changes only when what it says does.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit "unknown commit")
else()
  string(PREPEND commit "commit ")
endif()
file(CONFIGURE OUTPUT ${HEADER} @ONLY CONTENT [=[// Written by cmake/version_header.cmake.
#pragma once

namespace sluice {

inline constexpr char kSluiceVersion[] = "@VERSION@";
inline constexpr char kSluiceCommit[] = "@commit@";

}  // namespace sluice
]=])
